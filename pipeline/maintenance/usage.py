"""`usage`: the bytes that topics, partitions or days take in the store, the age of their data, and its cost.

If `is_verified` is false, the job adds up what the metadata knows: the logs of the finished segments, without indexes,
facts and the tags of encryption. If it is true, executors list the store. The listing has all objects, also
orphans. If the store is a folder, the result equals that of `du` without temporary files; for a large tier it also
lacks files that other programs put there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from pipeline.chosen_partitions import chosen_partitions
from pipeline.config import PipelineConfig
from pipeline.job_services import run_beside
from pipeline.maintenance.store_listing import TierStore, expected_partition, list_part, listing_plan, time_of
from pipeline.maintenance.usage_line import DAY_MS, UsageBy, UsageLine, grouped
from pipeline.spark.task_runner import SparkRunner, TaskRunner
from pipeline.spark.worker import worker
from tiers.access.open_tier import OpenTier, open_tier
from tiers.access.progress import SILENCE, Progress
from tiers.model.stored_segment import StoredSegment

AGES_DAYS = (1, 7, 30, 90, 365)
"""Upper bounds of the histogram's buckets in days, exclusive. One more bucket has no upper bound."""
_GIB = 1 << 30

LINE_SCHEMA = (
    "topic STRING, topic_id STRING, partition INT, day DATE, segments BIGINT, log_bytes BIGINT, overhead_bytes BIGINT, "
    "index_bytes BIGINT, facts_bytes BIGINT, unfinished_bytes BIGINT, orphan_bytes BIGINT, total_bytes BIGINT"
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
    details: list[UsageLine]

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


def usage(
    session: SparkSession | None,
    config: PipelineConfig,
    by: UsageBy = UsageBy.TOPIC,
    topics: str | None = None,
    progress: Progress = SILENCE,
) -> UsageReport:
    """Lists the store on Spark, or reads the metadata alone if `session` is None.

    `topics` is a pattern for whole names. Raises `RemoteTierError`, and `JobError` if the listing fails."""

    async def work() -> UsageReport:
        async with open_tier(config, progress) as tier:
            runner = None if session is None else SparkRunner(session, progress)
            return await usage_of_tier(tier, config, runner, by, topics)

    return worker().run(work())


async def usage_of_tier(
    tier: OpenTier, config: PipelineConfig, runner: TaskRunner | None, by: UsageBy, topics: str | None = None
) -> UsageReport:
    """Does the same as `usage` with a tier that is open. `runner` None: from the metadata alone."""
    partitions = chosen_partitions(tier.state, topics)
    if runner is None:
        known = (_known(one) for each in partitions for one in tier.state.stored_segments(each) if one.is_finished)
        return UsageReport(by, False, grouped(known, None))
    expected = [expected_partition(each, tier.state.stored_segments(each)) for each in partitions]
    plan = listing_plan(expected, tier.cluster_id, topics is None)
    listed = await run_beside(runner, "listing", plan, partial(list_part, TierStore(config, tier.cluster_id)))
    names = {str(each.topic_id): each.topic for each in tier.state.partitions()}
    for part in listed:
        for line in part.usage:
            line.topic = names.get(line.topic_id, line.topic)
    return UsageReport(by, True, grouped((line for part in listed for line in part.usage), None))


def _known(segment: StoredSegment) -> UsageLine:
    partition = segment.metadata.topic_id_partition
    return UsageLine(
        partition.topic,
        str(partition.topic_id),
        partition.partition,
        time_of(segment) // DAY_MS,
        segments=1,
        log_bytes=segment.metadata.segment_size_bytes,
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
        *(line.index_bytes, line.facts_bytes, line.unfinished_bytes, line.orphan_bytes, line.total_bytes),
    )
