"""Finds holes and overlaps in a partition's readable segments, which must tile from the log start to the remote end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.stored_segment import StoredSegment


class OffsetRun(NamedTuple):
    """A run of offsets; both bounds are inclusive."""

    first_offset: int
    last_offset: int


class Overlap(NamedTuple):
    """A run of offsets that two segments hold."""

    run: OffsetRun
    one: RemoteLogSegmentMetadata
    other: RemoteLogSegmentMetadata


def holes(metadata: RemoteLogMetadataState, partition: TopicIdPartition) -> Iterator[OffsetRun]:
    """Yields the runs of offsets from the log start to the remote end without a readable segment or recorded gap."""
    end, offset = metadata.remote_end_offset(partition), metadata.log_start_offset(partition)
    earliest = metadata.earliest_offset(partition)
    if end is None or offset is None or earliest is None:
        return
    offset = max(offset, earliest)
    for segment in metadata.answering_segments(partition, offset):
        if offset > end:
            return
        while (gap := metadata.gap_at(partition, offset)) is not None:
            offset = gap.next_offset
        if segment.start_offset > offset:
            yield OffsetRun(offset, segment.start_offset - 1)
        offset = max(offset, segment.valid_end_offset + 1)


def overlaps(readable: Iterable[StoredSegment], log_start: int) -> Iterator[Overlap]:
    """Yields the overlaps of one partition's readable segments from `log_start` on.

    `readable` must be in ascending order of start offsets. Each segment is compared with the earlier segment that
    reaches furthest. Offsets that a CUT cut off do not count."""
    furthest: StoredSegment | None = None
    reach = -1
    for _, together in groupby(readable, key=lambda each: each.start_offset):
        for segment in sorted(together, key=lambda each: each.valid_end_offset):
            start, end = segment.start_offset, segment.valid_end_offset
            if end < start or end < log_start:
                continue
            last = min(end, reach)
            if furthest is not None and max(start, log_start) <= last:
                yield Overlap(OffsetRun(max(start, log_start), last), furthest.metadata, segment.metadata)
            if end > reach:
                furthest, reach = segment, end
