"""The series of a topic and of a partition: they exist from the start, and their number has a bound."""

from __future__ import annotations

from uuid import UUID

from prometheus_client import CollectorRegistry

from tests.support.fakes.record_batches import batch_of
from tests.support.metric_names import series_per_partition, series_per_topic
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.topic_policy import TierWork
from tiers.model.ids import TopicIdPartition
from tiers.tasks.alarms import STATES, AlarmReason
from tiers.tasks.metrics import TOPIC_KEPT_MS, RemoteLogManagerMetrics

HOUR_MS = 3_600_000

SERIES_PER_TOPIC = series_per_topic() - len(TierWork)
"""From the start. The others are there while work is paused."""
MEASURED = {
    "tidegate_remote_log_gap_offsets",
    "tidegate_remote_log_metadata_count",
    "tidegate_remote_log_recorded_cuts",
    "tidegate_remote_log_size_bytes",
}
"""The gauges of a partition that begin when the owner looks at the metadata."""
SERIES_PER_PARTITION = series_per_partition() - len(MEASURED)
"""From the start."""


def partitions(topics: int, per_topic: int) -> list[TopicIdPartition]:
    return [TopicIdPartition(UUID(int=n), each, f"topic-{n}") for n in range(topics) for each in range(per_topic)]


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """The series with a topic: the values of the labels follow the name, by the labels' names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if "topic" in sample.labels and not sample.name.endswith("_created")
    }


def test_a_topic_and_a_partition_have_all_series_from_the_start() -> None:
    registry = CollectorRegistry()
    metrics = RemoteLogManagerMetrics(registry)
    for partition in partitions(10, 3):
        metrics.add(partition)
    found = samples(registry)
    assert set(found.values()) == {0}
    assert len(found) == 10 * SERIES_PER_TOPIC + 30 * SERIES_PER_PARTITION
    assert not MEASURED & {name for name, *_ in found}
    assert all(("tidegate_remote_log_alarms_total", reason, "topic-7") in found for reason in AlarmReason)
    assert all(("tidegate_remote_log_alarm", reason, "topic-7") in found for reason in STATES)


def test_the_gauges_and_alarms_of_a_partition_go_with_it() -> None:
    registry = CollectorRegistry()
    metrics = RemoteLogManagerMetrics(registry)
    one, other = partitions(1, 2)
    for partition in (one, other):
        metrics.add(partition)
        metrics.alarms.begin(partition.topic, AlarmReason.CLOCK_SKEW, str(partition))
        metrics.alarms.begin(partition.topic, AlarmReason.STAGE_FAILING, f"{partition} copy")
        metrics.log_gap_offsets.labels(partition.topic, str(partition.partition)).set(1)
    metrics.copy_bytes.labels("topic-0").inc(7)
    metrics.forget(one)
    metrics.keep_topics(set(), 1)
    metrics.keep_topics(set(), TOPIC_KEPT_MS)
    found = samples(registry)
    assert found["tidegate_remote_copy_bytes_total", "topic-0"] == 7, "for as long as a scrape may read it"
    assert found["tidegate_remote_log_alarm", "clock-skew", "topic-0"] == 1
    assert found["tidegate_remote_log_alarm", "stage-failing", "topic-0"] == 1
    assert len(found) == SERIES_PER_TOPIC + SERIES_PER_PARTITION + 1


def test_a_topic_with_an_alarm_keeps_its_series() -> None:
    registry = CollectorRegistry()
    metrics = RemoteLogManagerMetrics(registry)
    metrics.alarms.begin("gone", AlarmReason.TOPICS_MISSING, "id")
    for hour in range(5):
        metrics.keep_topics(set(), hour * TOPIC_KEPT_MS)
    assert samples(registry)["tidegate_remote_log_alarm", "topics-missing", "gone"] == 1
    metrics.alarms.end("gone", AlarmReason.TOPICS_MISSING, "id")
    for hour in range(5, 8):
        metrics.keep_topics(set(), hour * TOPIC_KEPT_MS)
    assert samples(registry) == {}


async def test_the_oldest_uncopied_record_has_the_age_of_its_timestamp(bench: Workbench) -> None:
    def oldest_s() -> float:
        return bench.metric("remote_oldest_uncopied_seconds", topic="orders", partition="0")

    bench.log.append(batch_of(0, 10, timestamp=bench.wall_ms - HOUR_MS))
    await bench.copy_all()
    assert bench.state.remote_end_offset(PARTITION) is None
    assert oldest_s() == 0
    bench.now_ms += 1_000
    bench.wall_ms += 1_000
    await bench.copy()
    assert oldest_s() == HOUR_MS / 1000 + 1
    bench.now_ms += POLICY.segment_ms
    await bench.copy_all()
    assert bench.state.remote_end_offset(PARTITION) == 9
    await bench.copy()
    assert oldest_s() == 0
