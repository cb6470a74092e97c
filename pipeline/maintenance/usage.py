"""`usage`: the bytes of the logs that topics, partitions or days have in the store.

The job adds up what the metadata knows, and asks the store nothing. The metadata does not know the sizes of indexes and
facts, nor the tags of encryption. `scrub --level meta` lists all objects.
"""

from __future__ import annotations

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


class UsageBy(StrEnum):
    TOPIC = "topic"
    PARTITION = "partition"
    DAY = "day"


@dataclass(slots=True)
class UsageLine:
    """What a part of the tier takes in the store. `partition` and `day` are None if the line has all of them.

    `day` is the day in UTC of the latest record of the segments.
    `unfinished_bytes` is the announced size of the logs that are being copied or deleted."""

    topic: str
    topic_id: str
    partition: int | None
    day: str | None
    segments: int = 0
    log_bytes: int = 0
    unfinished_bytes: int = 0


async def usage(
    config: PipelineConfig, by: UsageBy = UsageBy.TOPIC, topics: str | None = None, progress: Progress = SILENCE
) -> list[UsageLine]:
    """`topics` is a pattern for whole names. Raises `RemoteTierError`, `JobError`."""
    async with open_metadata(config, progress) as tier:
        return usage_of(tier.state, by, topics)


def usage_of(metadata: RemoteLogMetadataState, by: UsageBy, topics: str | None = None) -> list[UsageLine]:
    """Returns the lines by topic, partition and day."""
    found: dict[tuple[str, str, int | None, str | None], UsageLine] = {}
    for each in chosen_partitions(metadata, topics):
        for segment in metadata.stored_segments(each):
            partition = each.partition if by is UsageBy.PARTITION else None
            day = _day_of(segment) if by is UsageBy.DAY else None
            place = each.topic, str(each.topic_id), partition, day
            line = found.setdefault(place, UsageLine(*place))
            if segment.is_finished:
                line.segments += 1
                line.log_bytes += segment.segment_size_bytes
            else:
                line.unfinished_bytes += segment.segment_size_bytes
    return sorted(found.values(), key=lambda line: (line.topic, line.topic_id, line.partition or 0, line.day or ""))


def _day_of(segment: StoredSegment) -> str:
    """Returns the day of the latest record. Records may have no time: the day of the copy counts then."""
    time_ms = segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.event_timestamp_ms
    day = time_ms // DAY_MS
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).date().isoformat()
    except OverflowError:
        return f"day {day}"
