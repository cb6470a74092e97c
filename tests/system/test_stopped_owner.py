"""An owner is stopped (SIGSTOP) in the middle of its work, and goes on after another proxy has taken over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import pytest
from confluent_kafka import KafkaError

from tests.support.rigs.loss_rig import Site, alarms, lines_about, numbered, records_from
from tests.support.rigs.replicated_topic import FOLLOWER, LEADER, create_replicated_topic, until_in_sync
from tests.support.rigs.strict_consumer import consumer_at, local_log_start
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.altered_tidegate import resume, stopping_at, until_stopped
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess
from tiers.metadata.records.serde import decode_value
from tiers.model.segment_metadata import RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.storage.object_key import parse_segment_key

pytestmark = pytest.mark.integration

RECORDS, MORE = 600, 300
KEEPS_ALL_BYTES = 1 << 40
FINISHED = RemoteLogSegmentState.COPY_SEGMENT_FINISHED
METADATA_TOPIC_CONFIGS = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}


def proxies(
    cluster: KafkaCluster, home: Path, topic: str, step: str, kept_bytes: int = 1, late_kept_bytes: int = 1
) -> tuple[Site, TidegateProcess, TidegateProcess]:
    """Returns the site of the second proxy, and two proxies with one store. The first one stops itself at the step.

    The second proxy keeps `kept_bytes` local, and the first one `late_kept_bytes`."""
    tier = home / "tier"
    late = Site(cluster, home / "late", topic, tier=tier, local_retention_bytes=late_kept_bytes)
    site = Site(cluster, home / "other", topic, tier=tier, local_retention_bytes=kept_bytes)
    return site, late.proxy(stopping_at(step)), site.proxy()


def attempts(site: Site) -> set[UUID]:
    """Returns the segments that have an object in the store."""
    keys = (parse_segment_key(str(path.relative_to(site.tier_folder))) for path in site.objects())
    return {key.segment_uuid for key in keys if key is not None}


def owns(proxy: TidegateProcess) -> bool:
    """Whether the proxy owns the only metadata partition."""
    return proxy.metric("tidegate_remote_log_metadata_owned") == 1


def check_copied_once(site: Site, end_offset: int) -> None:
    """Checks that the segments cover every offset once, and that the store has their objects and no others."""
    code, out, err = site.tier("segments", site.topic, "--json")
    assert code == 0, err
    segments = sorted(json.loads(out), key=lambda one: int(one["start_offset"]))
    assert [one["start_offset"] for one in segments] == [0, *(one["end_offset"] + 1 for one in segments[:-1])]
    assert segments[-1]["end_offset"] == end_offset
    assert {one["state"] for one in segments} == {"COPY_SEGMENT_FINISHED"}
    assert attempts(site) == {UUID(one["segment"]) for one in segments}


def committed_ends(site: Site) -> Counter[UUID]:
    """Returns how often a COPY_SEGMENT_FINISHED of each segment was committed to the metadata topic."""
    ends: Counter[UUID] = Counter()
    settings: dict[str, str | int] = {"isolation.level": "read_committed", "enable.partition.eof": True}
    with consumer_at(site.cluster.bootstrap_servers, site.metadata_topic, 0, settings=settings) as consumer:
        while True:
            message = consumer.poll(TIMEOUT_S)
            assert message is not None
            if (error := message.error()) is not None:
                assert error.code() == KafkaError._PARTITION_EOF, str(error)
                return ends
            value = message.value()
            record = decode_value(value) if value else None
            if isinstance(record, RemoteLogSegmentMetadataUpdate) and record.state is FINISHED:
                ends[record.segment_id.id] += 1


def check_readable(proxy: TidegateProcess, topic: str, values: Sequence[bytes]) -> None:
    """Reads every record once, in order, with a consumer that fails instead of resetting."""
    assert records_from(proxy.bootstrap_servers, topic, 0, len(values)) == numbered(values)


@pytest.mark.parametrize("step", ["objects-written", "copy-verified"])
def test_a_late_owner_commits_no_copy(kafka: KafkaCluster, topic_name: str, tmp_path: Path, step: str) -> None:
    """The objects of its attempt are whole, so the next owner finishes the attempt, and copies no record twice."""
    values = random_values(RECORDS)
    create_topic(kafka.bootstrap_servers, topic_name)
    produce(kafka.bootstrap_servers, topic_name, values)
    site, late, other = proxies(kafka, tmp_path, topic_name, step)
    with late:
        until_stopped(late)
        (attempt,) = attempts(site)
        with other:
            until(lambda: site.is_remote_up_to(RECORDS - 1))
            check_copied_once(site, RECORDS - 1)
            ends = committed_ends(site)
            assert ends == Counter(dict.fromkeys(attempts(site), 1))
            assert attempt in ends
            until(lambda: site.local_log_start() > 0)
            check_readable(other, topic_name, values)

            resume(late)
            until(lambda: late.metric("tidegate_remote_copy_errors_total", topic=topic_name) == 1)
            more = random_values(MORE)
            produce(late.bootstrap_servers, topic_name, more)
            until(lambda: site.is_remote_up_to(RECORDS + MORE - 1))
            for proxy in (late, other):
                check_readable(proxy, topic_name, values + more)
            check_copied_once(site, RECORDS + MORE - 1)
            assert committed_ends(site) == Counter(dict.fromkeys(attempts(site), 1))
            assert alarms(late, topic_name) == alarms(other, topic_name) == 0


def test_a_late_trim_after_a_takeover_removes_what_is_remote(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """No check comes between the pause and the request. The new owner itself trims nothing here."""
    values = random_values(RECORDS)
    create_topic(kafka.bootstrap_servers, topic_name)
    produce(kafka.bootstrap_servers, topic_name, values)
    site, late, other = proxies(kafka, tmp_path, topic_name, "delete-records", KEEPS_ALL_BYTES)
    with late:
        until_stopped(late)
        with other:
            until(lambda: owns(other))
            until(lambda: site.is_remote_up_to(RECORDS - 1))
            assert site.local_log_start() == 0

            resume(late)
            until(lambda: site.local_log_start() > 0)
            more = random_values(MORE)
            produce(other.bootstrap_servers, topic_name, more)
            until(lambda: site.is_remote_up_to(RECORDS + MORE - 1))
            assert site.local_log_start() <= RECORDS
            for proxy in (late, other):
                check_readable(proxy, topic_name, values + more)
            check_copied_once(site, RECORDS + MORE - 1)


@pytest.mark.parametrize(
    ("shared_count", "late_retention_bytes"),
    [pytest.param(600, 650_000, id="into-shared-records"), pytest.param(50, 1, id="into-lost-records")],
)
def test_a_late_trim_after_an_unclean_election_removes_nothing(
    kafka_of_three: KafkaCluster,
    topic_name: str,
    tmp_path: Path,
    shared_count: int,
    late_retention_bytes: int,
) -> None:
    """The late owner has copied records that the new leader lacks, and trims up to shared ones or up to lost ones."""
    cluster, topic = kafka_of_three, topic_name[-60:]
    create_replicated_topic(cluster, topic)
    shared, lost, replacing = random_values(shared_count), random_values(800 - shared_count), random_values(900)
    produce(cluster.bootstrap_servers, topic, shared)
    until_in_sync(cluster, topic)
    site, late, other = proxies(cluster, tmp_path, topic, "delete-records", KEEPS_ALL_BYTES, late_retention_bytes)
    # A proxy that creates it while a broker is stopped may put it on the two brokers that stop in this test.
    create_topic(cluster.bootstrap_servers, site.metadata_topic, replicas=3, config=METADATA_TOPIC_CONFIGS)
    cluster.stop_broker(FOLLOWER)
    try:
        produce(cluster.bootstrap_servers, topic, lost)
        with late:
            until_stopped(late)
            assert site.bounds()["remote_end"] >= shared_count
            cluster.kill_broker(LEADER)
            cluster.start_broker(FOLLOWER)
            produce(cluster.bootstrap_servers, topic, replacing)
            with site.alarmed(other):
                until(lambda: alarms(other, topic, "cut") == 1)
                resume(late)
                until(lambda: is_another_owner_known(late))
                cluster.start_broker(LEADER)
                until_in_sync(cluster, topic)
                assert local_log_start(cluster, topic) == 0
                for bootstrap in (cluster.bootstrap_servers, late.bootstrap_servers, other.bootstrap_servers):
                    found = records_from(bootstrap, topic, 0, shared_count + len(replacing))
                    assert found == numbered(shared + replacing)
                assert alarms(other, topic) == 1
    finally:
        for node_id in (LEADER, FOLLOWER):
            if not cluster.brokers[node_id].running:
                cluster.start_broker(node_id)


def is_another_owner_known(late: TidegateProcess) -> bool:
    """Whether the proxy has joined the group again, and has ended its work."""
    is_assigned_again = len(lines_about(late, "metadata partitions were assigned")) > 1
    return is_assigned_again and late.metric("tidegate_owned_partitions") == 0
