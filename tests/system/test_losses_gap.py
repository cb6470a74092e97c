"""An administrator or the broker's retention removes records before the copy. Only those records are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.rigs.loss_rig import (
    SEGMENT_BYTES,
    Site,
    Watch,
    alarms,
    leader_behind,
    numbered,
    records_from,
)
from tests.support.rigs.record_deletion import delete_records
from tests.support.rigs.strict_consumer import RECORD, until_trimmed
from tests.support.rigs.topic_config_client import alter
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration

COPIED, AFTER = 600, 500
MIB = 1 << 20


def delete_ahead(cluster: KafkaCluster, topic: str) -> list[bytes]:
    """Deletes records at the broker, as an administrator does. Returns the values produced meanwhile."""
    values = random_values(400)
    produce(cluster.bootstrap_servers, topic, values)
    assert delete_records(cluster.bootstrap_servers, topic, COPIED + 300) == COPIED + 300
    return values


def expire_ahead(cluster: KafkaCluster, topic: str) -> list[bytes]:
    """Lets the broker expire records with a short retention for a while. Returns the values produced meanwhile."""
    values = random_values(5000)
    produce(cluster.bootstrap_servers, topic, values)
    assert alter(cluster.bootstrap_servers, {topic: {"retention.bytes": str(2 * MIB)}}) == [0]
    until_trimmed(cluster, topic, COPIED + 1)
    assert alter(cluster.bootstrap_servers, {topic: {"retention.bytes": None}}) == [0]
    return values


def copied(site: Site) -> list[bytes]:
    """Produces records, and waits until they are copied and trimmed. Stops the proxy. Returns the values."""
    values = random_values(COPIED)
    create_topic(site.cluster.bootstrap_servers, site.topic, config={"segment.bytes": str(MIB)})
    with site.proxy() as proxy:
        produce(proxy.bootstrap_servers, site.topic, values)
        until(lambda: site.is_remote_up_to(COPIED - 1))
        until_trimmed(site.cluster, site.topic, COPIED // 2)
    return values


@pytest.mark.parametrize("remove", [delete_ahead, expire_ahead], ids=["deleted", "expired"])
def test_a_gap_costs_only_its_own_records(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, remove: Callable[[KafkaCluster, str], list[bytes]]
) -> None:
    site = Site(kafka, tmp_path, topic_name)
    values = copied(site)
    values += remove(kafka, topic_name)
    gap_end = site.local_log_start()
    assert COPIED < gap_end < len(values)

    with site.proxy() as proxy:
        watch = Watch(site, proxy, [0, COPIED // 2, COPIED - 1, COPIED, gap_end - 1, gap_end, len(values) - 1])
        watch.until(lambda: alarms(proxy, topic_name, "gap") > 0)
        check_both_sides(proxy, topic_name, values, gap_end)

        more = random_values(AFTER)
        produce(proxy.bootstrap_servers, topic_name, more)
        values += more
        watch.until(lambda: site.is_remote_up_to(len(values) - 1))
        until_trimmed(kafka, topic_name, len(values) - AFTER // 2)
        watch.check()
        check_both_sides(proxy, topic_name, values, gap_end)
        assert site.bounds()["gaps"] == [{"first_offset": COPIED, "next_offset": gap_end}]
        assert gap_offsets(proxy, topic_name) == gap_end - COPIED
        assert alarms(proxy, topic_name, "gap") == 1

        # The retention keeps less than was copied behind the gap.
        kept_bytes = (len(values) - gap_end) * 1000 - 2 * SEGMENT_BYTES
        assert alter(kafka.bootstrap_servers, {topic_name: {"retention.bytes": str(kept_bytes)}}) == [0]
        until(lambda: site.bounds()["gaps"] == [])
        until(lambda: gap_offsets(proxy, topic_name) == 0)
        until(lambda: (site.earliest(leader_behind(proxy)) or 0) > gap_end)
        start = site.until_earliest(leader_behind(proxy))
        found = records_from(proxy.bootstrap_servers, topic_name, start, len(values) - start)
        assert found == numbered(values)[start:]
        assert alarms(proxy, topic_name, "gap") == 1


def gap_offsets(proxy: TidegateProcess, topic: str) -> float:
    return proxy.metric("tidegate_remote_log_gap_offsets", topic=topic, partition="0")


def check_both_sides(proxy: TidegateProcess, topic: str, values: Sequence[bytes], gap_end: int) -> None:
    """Reads across the gap, and from offsets within it, with consumers that fail instead of resetting."""
    behind = numbered(values)[gap_end:]

    def found(offset: int, count: int, isolation_level: str) -> list[RECORD]:
        return records_from(proxy.bootstrap_servers, topic, offset, count, isolation_level)

    for isolation_level in ("read_committed", "read_uncommitted"):
        across = numbered(values)[:COPIED] + behind
        assert found(0, len(across), isolation_level) == across
        for offset in (COPIED, (COPIED + gap_end) // 2, gap_end - 1, gap_end):
            assert found(offset, len(behind), isolation_level) == behind
