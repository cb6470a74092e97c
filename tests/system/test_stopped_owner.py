"""An owner is stopped (SIGSTOP) in the middle of its work, and goes on after another proxy has taken over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import pytest
from confluent_kafka import KafkaError

from tests.support.rigs.loss_rig import Site, alarms, numbered, records_from
from tests.support.rigs.strict_consumer import consumer_at
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.altered_tidegate import STOPS_ITSELF, resume, until_stopped
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess
from tiers.metadata.records.serde import decode_value
from tiers.model.segment_metadata import RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.storage.object_key import parse_segment_key

pytestmark = pytest.mark.integration

RECORDS, MORE = 600, 300
FINISHED = RemoteLogSegmentState.COPY_SEGMENT_FINISHED


def proxies(cluster: KafkaCluster, home: Path, topic: str) -> tuple[Site, TidegateProcess, TidegateProcess]:
    """Returns the site of the second proxy, and two proxies with one store. The first one stops itself before it
    commits a copy."""
    tier = home / "tier"
    late, site = (Site(cluster, home / name, topic, tier=tier) for name in ("late", "other"))
    return site, late.proxy(STOPS_ITSELF), site.proxy()


def attempts(site: Site) -> set[UUID]:
    """Returns the segments that have an object in the store."""
    keys = (parse_segment_key(str(path.relative_to(site.tier_folder))) for path in site.objects())
    return {key.segment_uuid for key in keys if key is not None}


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


def test_a_late_owner_commits_no_copy(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    """The objects of its attempt are whole, so the next owner finishes the attempt, and copies no record twice."""
    values = random_values(RECORDS)
    create_topic(kafka.bootstrap_servers, topic_name)
    produce(kafka.bootstrap_servers, topic_name, values)
    site, late, other = proxies(kafka, tmp_path, topic_name)
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
