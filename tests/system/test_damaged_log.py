"""One byte of the broker's log is flipped where copying continues: only the copy of that partition stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.records.record_batch import iterate_batches
from tests.support.rigs.loss_rig import Site, alarms, leader_behind, lines_about, numbered, records_from
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.rigs.topic_config_client import alter
from tests.support.rigs.waiting import until
from tests.support.servers.altered_tidegate import EARLY_ALARMS
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values

pytestmark = pytest.mark.integration

COPIED, DAMAGED, AFTER = 600, 300, 100
KEPT_BYTES = 500_000
KEEPS_ALL_BYTES = 1 << 40


def flip_a_byte(folder: Path, base_offset: int) -> None:
    """Inverts the last byte of the batch at an offset, in place: the broker serves it from the page cache."""
    for log in folder.glob("*.log"):
        content = log.read_bytes()
        for batch in iterate_batches(content):
            if batch.base_offset == base_offset:
                with log.open("r+b") as file:
                    file.seek(batch.end - 1)
                    file.write(bytes([content[batch.end - 1] ^ 0xFF]))
                return
    raise AssertionError(f"no batch begins at {base_offset}")


def test_a_damaged_batch_stops_only_the_copy(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    topic, values = topic_name, random_values(COPIED)
    create_topic(kafka.bootstrap_servers, topic)
    produce(kafka.bootstrap_servers, topic, values)
    site = Site(kafka, tmp_path, topic, local_retention_bytes=KEEPS_ALL_BYTES)
    with site.proxy():
        until(lambda: site.is_remote_up_to(COPIED - 1))
    assert site.local_log_start() == 0
    produce(kafka.bootstrap_servers, topic, more := random_values(DAMAGED))
    values += more
    copied = site.objects()
    flip_a_byte(kafka.log_folder(topic, 0), COPIED)

    with site.proxy(EARLY_ALARMS) as proxy:
        until(lambda: alarms(proxy, topic, "stage-failing") == 1)
        assert lines_about(proxy, "a stage of a partition keeps failing", f"partition={topic}-0", "stage=copy")
        assert site.local_log_start() == 0
        assert alter(proxy.bootstrap_servers, {topic: {"local.retention.bytes": "1"}}) == [0]
        until_trimmed(kafka, topic, COPIED - 100)
        assert alter(kafka.bootstrap_servers, {topic: {"retention.bytes": str(KEPT_BYTES)}}) == [0]
        until(lambda: site.until_earliest(leader_behind(proxy)) > 0)
        until(lambda: site.objects() < copied)
        failures = proxy.metric("tidegate_remote_log_stage_failures_total", topic=topic, stage="copy")
        until(lambda: proxy.metric("tidegate_remote_log_stage_failures_total", topic=topic, stage="copy") > failures)
        assert site.is_remote_up_to(COPIED - 1)
        assert site.objects() < copied, "something was copied beside the damaged batch"

        assert alter(kafka.bootstrap_servers, {topic: {"retention.bytes": None}}) == [0]
        flip_a_byte(kafka.log_folder(topic, 0), COPIED)
        until(lambda: site.is_remote_up_to(COPIED + DAMAGED - 1))
        produce(proxy.bootstrap_servers, topic, more := random_values(AFTER))
        values += more
        until(lambda: site.is_remote_up_to(len(values) - 1))
        until_trimmed(kafka, topic, COPIED + DAMAGED)
        log_start = site.until_earliest(leader_behind(proxy))
        found = records_from(proxy.bootstrap_servers, topic, log_start, len(values) - log_start)
        assert found == numbered(values)[log_start:]
        assert lines_about(proxy, "a stage of a partition works again", f"partition={topic}-0", "stage=copy")
        assert alarms(proxy, topic, "gap", "metadata-lost", "diverged", "cut") == 0
