"""`usage`: the bytes that topics, partitions or days take in the store, the age of their data, and its cost.

If `is_verified` is false, the job counts the segments that the metadata knows: executors read each segment's `.indexes`
object, which holds the length of the stored log. If it is true, executors list the store instead. Listing costs less
and also finds orphans. If the store is a folder, the result equals that of `du` without temporary files; for a large
tier it also lacks files that other programs put there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from pipeline.chosen_partitions import chosen_partitions
from pipeline.config import PipelineConfig
from pipeline.job_services import run_beside
from pipeline.maintenance.store_listing import TierStore, expected_partition, list_part, listing_plan, time_of
from pipeline.maintenance.usage_line import DAY_MS, UsageBy, UsageLine, grouped
from pipeline.spark.job import JobError
from pipeline.spark.task_runner import SparkRunner, TaskRunner
from pipeline.spark.worker import worker
from tiers.access.open_tier import OpenTier, open_tier, tiered_cluster
from tiers.access.progress import SILENCE, Progress
from tiers.bounded_gather import bounded_gather
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError
from tiers.model.ids import TopicIdPartition
from tiers.model.stored_segment import StoredSegment, stored_segment
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import partition_manifest_key
from tiers.storage.retries import with_retries

AGES_DAYS = (1, 7, 30, 90, 365)
"""Upper bounds of the histogram's buckets in days, exclusive. One more bucket has no upper bound."""
_TASK_OBJECTS = 2_000
_GETS_AT_ONCE = 16
_GIB = 1 << 30

LINE_SCHEMA = (
    "topic STRING, topic_id STRING, partition INT, day DATE, segments BIGINT, log_bytes BIGINT, overhead_bytes BIGINT, "
    "index_bytes BIGINT, manifest_bytes BIGINT, unfinished_bytes BIGINT, orphan_bytes BIGINT, total_bytes BIGINT"
)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in any currency. None means that the user did not ask for the cost."""

    gib_month: float | None = None
    thousand_requests: float | None = None

    def of_month(self, stored_bytes: int) -> float | None:
        return None if self.gib_month is None else stored_bytes / _GIB * self.gib_month

    def of_requests(self, requests: int) -> float | None:
        return None if self.thousand_requests is None else requests / 1000 * self.thousand_requests


@dataclass(slots=True)
class UsageReport:
    """`details` has a line for each partition and day. `lines` groups them as the user asked."""

    by: UsageBy
    is_verified: bool
    details: list[UsageLine] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """Segments whose size the store did not report, with the reason. They count with the size of their log."""

    @property
    def lines(self) -> list[UsageLine]:
        return grouped(self.details, self.by)

    def ages(self, today: int) -> dict[str, int]:
        """Returns the bytes of logs and indexes by the age of their latest records. `today` is in days since 1970."""
        found = dict.fromkeys((*(f"under {days} d" for days in AGES_DAYS), f"{AGES_DAYS[-1]} d and more"), 0)
        names = list(found)
        for line in self.details:
            if line.day is not None:
                age = max(0, today - line.day)
                bucket = next((number for number, days in enumerate(AGES_DAYS) if age < days), len(AGES_DAYS))
                found[names[bucket]] += line.log_bytes + line.index_bytes
        return found

    def dataframe(self, session: SparkSession) -> DataFrame:
        """Returns `lines` as a DataFrame."""
        return session.createDataFrame([_row(each) for each in self.lines], LINE_SCHEMA)


def day_text(day: int | None) -> str | None:
    if day is None:
        return None
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).date().isoformat()
    except OverflowError:
        return f"day {day}"


def written_objects(line: UsageLine) -> int:
    """Returns the least number of requests that wrote the objects. Multipart uploads take more."""
    return 2 * line.segments


def check_tiered(config: PipelineConfig) -> None:
    """Fails before Spark starts. Raises `RemoteTierError` if nothing was tiered yet, or if no broker answers."""

    async def look() -> None:
        async with tiered_cluster(config):
            pass

    worker().run(look())


def usage(
    session: SparkSession,
    config: PipelineConfig,
    by: UsageBy = UsageBy.TOPIC,
    topics: str | None = None,
    is_verified: bool = False,
    progress: Progress = SILENCE,
) -> UsageReport:
    """Runs the job on Spark. `topics` is a pattern for whole names. Raises `JobError`, `RemoteTierError`."""

    async def work() -> UsageReport:
        async with open_tier(config, progress) as tier:
            return await usage_of_tier(tier, config, SparkRunner(session, progress), by, topics, is_verified)

    return worker().run(work())


async def usage_of_tier(
    tier: OpenTier,
    config: PipelineConfig,
    runner: TaskRunner,
    by: UsageBy,
    topics: str | None = None,
    is_verified: bool = False,
) -> UsageReport:
    partitions = chosen_partitions(tier.metadata, topics)
    report = UsageReport(by, is_verified)
    store = TierStore(config, tier.cluster_id)
    if is_verified:
        expected = [expected_partition(each, tier.metadata.stored_segments(each)) for each in partitions]
        plan = listing_plan(expected, tier.cluster_id, topics is None)
        listed = await run_beside(runner, "listing", plan, partial(list_part, store))
        names = {str(each.topic_id): each.topic for each in tier.metadata.partitions()}
        for part in listed:
            for line in part.usage:
                line.topic = names.get(line.topic_id, line.topic)
        report.details = grouped((line for part in listed for line in part.usage), None)
        return report
    tasks = list(_measure_plan((each, tier.metadata.stored_segments(each)) for each in partitions))
    measured = await run_beside(runner, "measuring", tasks, partial(measure, store))
    report.details = grouped((line for part in measured for line in part.lines), None)
    report.unreadable = [said for part in measured for said in part.unreadable]
    if report.unreadable and len(report.unreadable) == sum(len(task.segments) for task in tasks):
        raise JobError(f"the store does not report the size of any segment: {report.unreadable[0]}")
    return report


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """The objects that one task measures. Each of `segments` is a partition key and the bytes of a `StoredSegment`."""

    segments: tuple[tuple[bytes, bytes], ...]
    manifests: tuple[TopicIdPartition, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    lines: list[UsageLine]
    unreadable: list[str]


def _measure_plan(
    partitions: Iterable[tuple[TopicIdPartition, Iterable[StoredSegment]]],
) -> Iterator[MeasureTask]:
    segments: list[tuple[bytes, bytes]] = []
    manifests: list[TopicIdPartition] = []
    for partition, found in partitions:
        manifests.append(partition)
        for segment in found:
            if not segment.is_finished:
                continue
            segments.append((segment.partition_key, segment.answer))
            if len(segments) + len(manifests) >= _TASK_OBJECTS:
                yield MeasureTask(tuple(segments), tuple(manifests))
                segments, manifests = [], []
    if segments or manifests:
        yield MeasureTask(tuple(segments), tuple(manifests))


def measure(store: TierStore, task: MeasureTask) -> Measured:
    """Sends one GET per segment and manifest. Raises `RemoteTierError`, `RemoteLogError` if the store cannot be
    opened."""
    return worker().run(_measure(store, task))


async def _measure(store: TierStore, task: MeasureTask) -> Measured:
    storage = await store.opened()
    unreadable: list[str] = []

    async def of_segment(known: StoredSegment) -> UsageLine:
        segment = known.metadata
        line = _line(segment.topic_id_partition, time_of(known) // DAY_MS)
        line.segments, line.log_bytes = 1, segment.segment_size_bytes
        try:
            data = await with_retries(lambda: storage.fetch_indexes(segment))
            chunks = decode_indexes_object(data, segment).chunks()
            line.log_bytes, line.index_bytes = sum(each.stored_bytes for each in chunks), len(data)
            line.overhead_bytes = line.log_bytes - segment.segment_size_bytes
        except RemoteStorageError as error:
            unreadable.append(f"{segment.topic_id_partition} {segment.segment_id.id}: {error}")
        return line

    async def of_manifest(partition: TopicIdPartition) -> UsageLine:
        line = _line(partition, None)
        key = partition_manifest_key(store.cluster_id, partition)
        with suppress(RemoteResourceNotFoundError):
            line.manifest_bytes = len(await with_retries(lambda: storage.get_object(key)))
        return line

    lines = await bounded_gather((stored_segment(*each) for each in task.segments), of_segment, _GETS_AT_ONCE)
    lines += await bounded_gather(task.manifests, of_manifest, _GETS_AT_ONCE)
    return Measured(grouped(lines, None), unreadable)


def _line(partition: TopicIdPartition, day: int | None) -> UsageLine:
    return UsageLine(
        partition.topic,
        str(partition.topic_id),
        partition.partition,
        day,
        unfinished_bytes=None,
        orphan_bytes=None,
    )


def _row(line: UsageLine) -> tuple[object, ...]:
    try:
        day = None if line.day is None else (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=line.day)).date()
    except OverflowError:
        day = None
    return (
        *(line.topic, line.topic_id, line.partition, day, line.segments, line.log_bytes, line.overhead_bytes),
        *(line.index_bytes, line.manifest_bytes, line.unfinished_bytes, line.orphan_bytes, line.total_bytes),
    )
