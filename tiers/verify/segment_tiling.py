"""Finds holes and overlaps in a partition's readable segments, which must tile from the log start to the remote end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    for segment in _in_order(readable):
        start, end = segment.start_offset, segment.valid_end_offset
        if end < start or end < log_start:
            continue
        if furthest is not None and start <= reach:
            last = min(end, reach)
            if last >= log_start:
                yield Overlap(OffsetRun(max(start, log_start), last), furthest.metadata, segment.metadata)
        if end > reach:
            furthest, reach = segment, end


def _in_order(segments: Iterable[StoredSegment]) -> Iterator[StoredSegment]:
    """Yields the segments in their order; of those with the same start offset, the shortest first."""
    together: list[StoredSegment] = []
    for segment in segments:
        if together and segment.start_offset != together[0].start_offset:
            yield from sorted(together, key=_valid_end)
            together.clear()
        together.append(segment)
    yield from sorted(together, key=_valid_end)


def _valid_end(segment: StoredSegment) -> int:
    return segment.valid_end_offset
