"""A copy is whole in the store, and the owner does not finish it: it is down, or the store refuses the read-back.

Meanwhile the broker removes records of the segment. The owner finishes the copy later, so every record stays readable.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rigs.loss_rig import Site, Watch, alarms, not_ready, numbered, records_from, site_over_s3
from tests.support.rigs.record_deletion import delete_records
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.rigs.topic_config_client import alter
from tests.support.rigs.waiting import until
from tests.support.servers.altered_tidegate import stopping_at, until_stopped
from tests.support.servers.faulty_s3 import FaultyS3, RefuseReadsOfTheNextSegment, refuse_nothing
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess
from tests.support.servers.versitygw import VersityGateway

pytestmark = pytest.mark.integration

RECORDS, MORE = 250, 150
LESS_THAN_A_SEGMENT = 60
KEPT_FOR_EVER = {"remote.log.retention.minutes": "-1"}
positions = pytest.mark.parametrize("copied", [0, RECORDS], ids=["first-segment", "later-segment"])


@pytest.fixture
def over_s3(
    kafka: KafkaCluster, s3: VersityGateway, topic_name: str, tmp_path: Path
) -> Iterator[tuple[Site, FaultyS3]]:
    create_topic(kafka.bootstrap_servers, topic_name)
    with site_over_s3(kafka, s3, tmp_path, topic_name) as made:
        yield made


def add_records(through: TidegateProcess | KafkaCluster, topic: str, values: list[bytes], count: int) -> None:
    """Produces `count` records, and adds their values to `values`."""
    more = random_values(count)
    produce(through.bootstrap_servers, topic, more)
    values += more


def copied_values(site: Site, proxy: TidegateProcess, count: int) -> list[bytes]:
    """Produces records, and waits until the store has them all. Returns their values."""
    values: list[bytes] = []
    add_records(proxy, site.topic, values, count)
    until(lambda: not values or site.is_remote_up_to(len(values) - 1))
    return values


def until_the_read_back_is_refused(faulty: FaultyS3) -> None:
    """Waits until the store has refused a read of the partition, which begins after both objects were written."""
    until(lambda: any(path.endswith((".log", ".indexes", "tier.json")) for _, path in faulty.refused))


def remove_at_the_broker(cluster: KafkaCluster, topic: str, end: int) -> None:
    """Lets the broker's own retention remove all records, which end at `end`."""
    assert alter(cluster.bootstrap_servers, {topic: {"retention.ms": "1"}}) == [0]
    until_trimmed(cluster, topic, end)
    assert alter(cluster.bootstrap_servers, {topic: {"retention.ms": None}}) == [0]


def check_all_is_well(site: Site, proxy: TidegateProcess, watch: Watch, values: list[bytes]) -> None:
    """Checks that new records are copied, that every record is readable, and that nothing waits for an operator."""
    add_records(proxy, site.topic, values, MORE)
    watch.until(lambda: site.is_remote_up_to(len(values) - 1))
    assert records_from(proxy.bootstrap_servers, site.topic, 0, len(values)) == numbered(values)
    until(lambda: proxy.metric("tidegate_remote_log_alarm", topic=site.topic, reason="metadata-lost") == 0)
    assert (alarms(proxy, site.topic, "gap"), site.bounds()["gaps"], not_ready(proxy)) == (0, [], "")
    code, _, err = site.tier("accept", f"{site.topic}:0")
    assert (code, "nothing to accept" in err) == (0, True), err


@positions
def test_a_copy_that_cannot_be_read_back_is_finished_later(over_s3: tuple[Site, FaultyS3], copied: int) -> None:
    site, faulty = over_s3
    with site.proxy() as proxy:
        assert alter(proxy.bootstrap_servers, {site.topic: KEPT_FOR_EVER}) == [0]
        values = copied_values(site, proxy, copied)
        faulty.refuses = RefuseReadsOfTheNextSegment()
        add_records(proxy, site.topic, values, LESS_THAN_A_SEGMENT)
        until_the_read_back_is_refused(faulty)
        watch = Watch(site, proxy, [0, copied, len(values) - 1])
        remove_at_the_broker(site.cluster, site.topic, len(values))
        watch.check()

        faulty.refuses = refuse_nothing
        check_all_is_well(site, proxy, watch, values)


@positions
def test_a_clean_restart_during_the_read_back_finishes_the_copy(over_s3: tuple[Site, FaultyS3], copied: int) -> None:
    site, faulty = over_s3
    with site.proxy() as proxy:
        values = copied_values(site, proxy, copied)
        faulty.refuses = RefuseReadsOfTheNextSegment()
        add_records(proxy, site.topic, values, RECORDS)
        until_the_read_back_is_refused(faulty)
    assert delete_records(site.cluster.bootstrap_servers, site.topic, copied + 10) == copied + 10
    faulty.refuses = refuse_nothing

    with site.alarmed_proxy() as proxy:
        check_all_is_well(site, proxy, Watch(site, proxy, [0, copied, len(values) - 1]), values)


@pytest.mark.parametrize(("step", "copied"), [("objects-written", 0), ("copy-verified", RECORDS)])
def test_a_kill_before_the_end_of_a_copy_loses_nothing(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, step: str, copied: int
) -> None:
    site = Site(kafka, tmp_path, topic_name)
    create_topic(kafka.bootstrap_servers, topic_name)
    values: list[bytes] = []
    if copied:
        with site.proxy() as proxy:
            values = copied_values(site, proxy, copied)
    with site.proxy(stopping_at(step)) as proxy:
        add_records(kafka, topic_name, values, RECORDS)  # the proxy may stop before it has passed on all records
        until_stopped(proxy)
        proxy.stop(signal.SIGKILL)
    assert delete_records(kafka.bootstrap_servers, topic_name, copied + 10) == copied + 10

    with site.alarmed_proxy() as proxy:
        check_all_is_well(site, proxy, Watch(site, proxy, [0, copied, len(values) - 1]), values)
