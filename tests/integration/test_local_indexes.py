"""Kafka and `tidegate serve` as processes: a proxy that copied a segment needs no GET of the segment's indexes."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.rigs.strict_consumer import consumer_at, read, until_trimmed
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = [pytest.mark.integration, pytest.mark.full]

RECORDS = 2000
RECORDS_OF_A_SEGMENT = 90
"""The most that fit in `segment_bytes`."""


def samples_of(proxy: TidegateProcess, name: str, **labels: str) -> list[Sample]:
    return [
        sample
        for family in text_string_to_metric_families(proxy.metrics())
        for sample in family.samples
        if sample.name.endswith(name) and labels.items() <= sample.labels.items()
    ]


def sum_of(proxy: TidegateProcess, name: str, **labels: str) -> int:
    """Returns the sum of a metric over the processes that serve clients."""
    return int(
        sum(
            sample.value for sample in samples_of(proxy, name, **labels) if sample.labels.get("process") != "remote-log"
        )
    )


def all_is_copied(proxy: TidegateProcess, topic: str) -> bool:
    lags = [each.value for each in samples_of(proxy, "remote_copy_lag_bytes") if each.labels["topic"] == topic]
    return lags == [0.0]


def test_the_first_read_of_a_copied_segment_requests_no_index(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    settings: dict[str, str | int] = {
        "workers": 2,
        "remote.log.manager.task.interval.ms": 200,
        "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
        "remote.log.visible.after.ms": 2000,
    }
    folder, values = tmp_path / "state" / "index", random_values(RECORDS)
    create_topic(kafka.bootstrap_servers, topic_name)
    with tidegate_over(kafka, tmp_path, tiered=[topic_name], segment_bytes=100_000, settings=settings) as proxy:

        def gets(operation: str) -> int:
            return sum_of(proxy, "tidegate_remote_storage_requests_total", operation=operation)

        produce(proxy.bootstrap_servers, topic_name, values)
        until(lambda: all_is_copied(proxy, topic_name))
        # Each trim reads the indexes of the segments. The last segment stays on the broker.
        until_trimmed(kafka, topic_name, RECORDS - RECORDS_OF_A_SEGMENT)
        indexes, logs = gets("fetch_indexes"), gets("fetch_log_segment")
        with consumer_at(proxy.bootstrap_servers, topic_name, 0) as consumer:
            assert read(consumer, RECORDS) == list(enumerate(values))
        assert gets("fetch_log_segment") > logs
        assert gets("fetch_indexes") == indexes
        assert sum_of(proxy, "tidegate_remote_reader_cache_hits_total", cache="index_files") > 2
        assert sum_of(proxy, "tidegate_remote_reader_cache_misses_total", cache="index_files") == 0
        sizes = [each.value for each in samples_of(proxy, "tidegate_remote_reader_cache_bytes", cache="index_files")]
        assert max(sizes) >= sum(path.stat().st_size for path in folder.glob("*/*"))
    assert list(folder.glob(f"{topic_name}-0/*.remoteLogIndex"))
