"""How the segments of a partition lie beside each other: readable ones tile from the log start to the remote end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata


class OffsetRun(NamedTuple):
    """Both inclusive."""

    first_offset: int
    last_offset: int


class Overlap(NamedTuple):
    """Offsets that two segments hold."""

    run: OffsetRun
    one: RemoteLogSegmentMetadata
    other: RemoteLogSegmentMetadata


def gaps(metadata: RemoteLogMetadataReader, partition: TopicIdPartition) -> Iterator[OffsetRun]:
    """Runs of offsets between the log start and the remote end that no readable segment has."""
    end, offset = metadata.remote_end_offset(partition), metadata.log_start_offset(partition)
    while end is not None and offset is not None and offset <= end:
        segment = metadata.next_segment(partition, offset)
        if segment is None:
            return
        if segment.start_offset > offset:
            yield OffsetRun(offset, segment.start_offset - 1)
        offset = segment.valid_end_offset + 1


def overlaps(readable: Iterable[RemoteLogSegmentMetadata], log_start: int) -> Iterator[Overlap]:
    """Of the readable segments of one partition, from `log_start` on; what was cut off overlaps nothing.

    Each segment is held against the one before it that reaches furthest."""
    furthest: RemoteLogSegmentMetadata | None = None
    kept = (each for each in readable if not each.is_cut_off and each.valid_end_offset >= log_start)
    for segment in sorted(kept, key=_place):
        if furthest is not None and segment.start_offset <= furthest.valid_end_offset:
            last = min(segment.valid_end_offset, furthest.valid_end_offset)
            if last >= log_start:
                yield Overlap(OffsetRun(max(segment.start_offset, log_start), last), furthest, segment)
        if furthest is None or segment.valid_end_offset > furthest.valid_end_offset:
            furthest = segment


def _place(segment: RemoteLogSegmentMetadata) -> tuple[int, int]:
    return segment.start_offset, segment.valid_end_offset
