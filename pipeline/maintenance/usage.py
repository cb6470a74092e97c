"""`usage`: the bytes of the logs that topics, partitions or days have in the store, the age of their data, its cost.

The job adds up what the metadata knows, and asks the store nothing. The metadata does not know the sizes of indexes and
facts, nor the tags of encryption. `scrub --level meta` lists all objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from pipeline.chosen_partitions import chosen_partitions
from pipeline.config import PipelineConfig
from tiers.access.open_tier import open_metadata
from tiers.access.progress import SILENCE, Progress
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.stored_segment import StoredSegment

DAY_MS = 86_400_000
AGES_DAYS = (1, 7, 30, 90, 365)
"""Upper bounds of the histogram's buckets in days, exclusive. One more bucket has no upper bound."""
_GIB = 1 << 30


class UsageBy(StrEnum):
    TOPIC = "topic"
    PARTITION = "partition"
    DAY = "day"


@dataclass(slots=True)
class UsageLine:
    """What a part of the tier takes in the store. `day` counts from 1970 in UTC and is the day of a segment's latest
    record. None: all days.

    `unfinished_bytes` is the announced size of the logs that are being copied or deleted."""

    topic: str
    topic_id: str
    partition: int | None
    day: int | None = None
    segments: int = 0
    log_bytes: int = 0
    unfinished_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.log_bytes + self.unfinished_bytes

    def add(self, other: UsageLine) -> None:
        self.segments += other.segments
        self.log_bytes += other.log_bytes
        self.unfinished_bytes += other.unfinished_bytes


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
    details: list[UsageLine]

    @property
    def lines(self) -> list[UsageLine]:
        return grouped(self.details, self.by)

    def ages(self, today: int) -> dict[str, int]:
        """Returns the bytes of logs by the age of their latest records. `today` is in days since 1970."""
        found = dict.fromkeys((*(f"under {days} d" for days in AGES_DAYS), f"{AGES_DAYS[-1]} d and more"), 0)
        names = list(found)
        for line in self.details:
            age = max(0, today - (line.day or 0))
            bucket = next((number for number, days in enumerate(AGES_DAYS) if age < days), len(AGES_DAYS))
            found[names[bucket]] += line.log_bytes
        return found


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


async def usage(
    config: PipelineConfig, by: UsageBy = UsageBy.TOPIC, topics: str | None = None, progress: Progress = SILENCE
) -> UsageReport:
    """`topics` is a pattern for whole names. Raises `RemoteTierError`, `JobError`."""
    async with open_metadata(config, progress) as tier:
        return usage_of(tier.state, by, topics)


def usage_of(metadata: RemoteLogMetadataState, by: UsageBy, topics: str | None = None) -> UsageReport:
    partitions = chosen_partitions(metadata, topics)
    return UsageReport(by, grouped((_line(one) for each in partitions for one in metadata.stored_segments(each)), None))


def grouped(lines: Iterable[UsageLine], by: UsageBy | None) -> list[UsageLine]:
    """Adds lines up and returns them by topic, partition and day. `by` None: one line per partition and day."""
    found: dict[tuple[str, str, int, int], UsageLine] = {}
    for line in lines:
        partition = None if by in (UsageBy.TOPIC, UsageBy.DAY) else line.partition
        day = None if by in (UsageBy.TOPIC, UsageBy.PARTITION) else line.day
        key = line.topic, line.topic_id, -1 if partition is None else partition, -1 if day is None else day
        if key not in found:
            found[key] = UsageLine(line.topic, line.topic_id, partition, day)
        found[key].add(line)
    return [found[key] for key in sorted(found)]


def _line(segment: StoredSegment) -> UsageLine:
    partition, size_bytes = segment.metadata.topic_id_partition, segment.segment_size_bytes
    # Records may have no time: the time of the copy counts then.
    time_ms = segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.event_timestamp_ms
    line = UsageLine(partition.topic, str(partition.topic_id), partition.partition, time_ms // DAY_MS)
    if segment.is_finished:
        line.segments, line.log_bytes = 1, size_bytes
    else:
        line.unfinished_bytes = size_bytes
    return line
