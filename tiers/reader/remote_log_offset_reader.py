"""`RemoteLogOffsetReader` finds offsets of the remote tier by timestamp, for ListOffsets (docs/semantics.md 5.2).

Timestamps are not monotonic, so the reader checks the maximum timestamp of each segment in offset order and never uses
a binary search. If a segment's maximum is high enough but its record lies below the start offset, the reader continues
with the next segment, whereas Kafka stops there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from protocol.records.record_batch import NO_TIMESTAMP, iterate_batches
from protocol.records.record_reader import first_record_at_or_after, read_records
from tiers.bounded_gather import in_turns
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.chunk_fetcher import Caller, ChunkFetcher, IndexedSegment, SegmentDeletedError

_SEGMENTS_BETWEEN_YIELDS = 256


class TimestampOffset(NamedTuple):
    """A record's timestamp and offset, and the leader epoch of its batch; -1 when the batch has none."""

    timestamp_ms: int
    offset: int
    leader_epoch: int


class RemoteLogOffsetReader:
    def __init__(self, state: RemoteLogMetadataState, fetcher: ChunkFetcher) -> None:
        self._state = state
        self.fetcher = fetcher

    async def offset_for_timestamp(
        self, partition: TopicIdPartition, timestamp_ms: int, from_offset: int, to_offset: int, caller: Caller
    ) -> TimestampOffset | None:
        """Returns the first record in `[from_offset, to_offset)` with at least that timestamp.

        Control records count as well. None means that the range has no such record. If a segment cannot be read, it
        raises like `RemoteLogReader.read`.
        """
        async for segment in in_turns(self._segments(partition, from_offset, to_offset), _SEGMENTS_BETWEEN_YIELDS):
            if segment.max_timestamp_ms >= timestamp_ms:
                try:
                    found = await self._search(segment, timestamp_ms, from_offset, caller)
                except SegmentDeletedError:
                    begin = max(from_offset, segment.start_offset)
                    return await self.offset_for_timestamp(partition, timestamp_ms, begin, to_offset, caller)
                if found is not None:
                    return found if found.offset < to_offset else None
        return None

    async def max_timestamp(
        self, partition: TopicIdPartition, from_offset: int, to_offset: int, caller: Caller
    ) -> TimestampOffset | None:
        """Returns the first record with the greatest timestamp, control records included; None when there is none.

        The search covers the segments that begin in `[from_offset, to_offset)`, and the part from `from_offset` on of
        the segment that holds `from_offset`. Raises like `RemoteLogReader.read`, and `SegmentDeletedError`."""
        best: RemoteLogSegmentMetadata | None = None
        found: TimestampOffset | None = None
        async for segment in in_turns(self._segments(partition, from_offset, to_offset), _SEGMENTS_BETWEEN_YIELDS):
            if segment.start_offset < from_offset or segment.cut_at is not None:
                part = await self._max_of_part(segment, from_offset, caller)
                if part is not None and (found is None or part.timestamp_ms > found.timestamp_ms):
                    found = part
            elif best is None or segment.max_timestamp_ms > best.max_timestamp_ms:
                best = segment
        if (
            best is None
            or best.max_timestamp_ms < 0
            or (found is not None and (-found.timestamp_ms, found.offset) < (-best.max_timestamp_ms, best.start_offset))
        ):
            return found
        return await self._search(best, best.max_timestamp_ms, from_offset, caller)

    def _segments(
        self, partition: TopicIdPartition, from_offset: int, to_offset: int
    ) -> Iterator[RemoteLogSegmentMetadata]:
        """Yields the readable segments of `[from_offset, to_offset)`, each as the metadata has it at that moment."""
        while (segment := self._state.next_segment(partition, from_offset)) and segment.start_offset < to_offset:
            yield segment
            from_offset = segment.valid_end_offset + 1

    async def _max_of_part(
        self, segment: RemoteLogSegmentMetadata, from_offset: int, caller: Caller
    ) -> TimestampOffset | None:
        """Returns the first record with the greatest timestamp in the valid part of the segment from `from_offset` on.

        The segment's maximum timestamp may lie before `from_offset` or after a CUT. So this looks at the chunks, and
        then at the batches and records of chunks that lie only partly in the range."""
        index = await self.fetcher.index(segment, caller)
        end_offset, greatest_ms = segment.valid_end_offset, NO_TIMESTAMP
        for number, chunk in enumerate(index.chunks()):
            if chunk.last_offset < from_offset or chunk.first_offset > end_offset:
                continue
            if chunk.first_offset >= from_offset and chunk.last_offset <= end_offset:
                greatest_ms = max(greatest_ms, chunk.max_timestamp_ms)
                continue
            view, *_ = await self.fetcher.chunks(IndexedSegment(segment, index), number, 1, caller)
            greatest_ms = max(greatest_ms, await asyncio.to_thread(_max_in_chunk, view, from_offset, end_offset))
        if greatest_ms < 0:
            return None
        return await self._search(segment, greatest_ms, from_offset, caller)

    async def _search(
        self, segment: RemoteLogSegmentMetadata, timestamp_ms: int, from_offset: int, caller: Caller
    ) -> TimestampOffset | None:
        index = await self.fetcher.index(segment, caller)
        number = index.chunk_number_for_timestamp(timestamp_ms)
        while number is not None:
            if index.chunks()[number].last_offset >= from_offset:
                view, *_ = await self.fetcher.chunks(IndexedSegment(segment, index), number, 1, caller)
                found = await asyncio.to_thread(_first_in_chunk, view, timestamp_ms, from_offset)
                if found is not None:
                    return found if found.offset <= segment.valid_end_offset else None
            number = index.chunk_number_for_timestamp(timestamp_ms, number + 1)
        return None


def _first_in_chunk(view: memoryview, timestamp_ms: int, from_offset: int) -> TimestampOffset | None:
    for batch in iterate_batches(view):
        found = first_record_at_or_after(view, batch, timestamp_ms, from_offset)
        if found is not None:
            return TimestampOffset(found.timestamp, found.offset, batch.leader_epoch)
    return None


def _max_in_chunk(view: memoryview, from_offset: int, to_offset: int) -> int:
    """Returns the greatest timestamp in `[from_offset, to_offset]`, -1 when there is none."""
    greatest_ms = NO_TIMESTAMP
    for batch in iterate_batches(view):
        if batch.last_offset > to_offset:
            break
        if batch.base_offset >= from_offset:
            greatest_ms = max(greatest_ms, batch.max_timestamp)
        elif batch.last_offset >= from_offset:
            for record in read_records(view, batch):
                if record.offset >= from_offset:
                    greatest_ms = max(greatest_ms, record.timestamp)
    return greatest_ms
