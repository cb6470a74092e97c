"""`RemoteLogOffsetReader` finds offsets of the remote tier by timestamp, for ListOffsets (docs/semantics.md 5.2).

Timestamps are not monotonic, so the reader checks the maximum timestamp of each segment in offset order and never uses
a binary search. If a segment's maximum is high enough but its record lies below the start offset, the reader continues
with the next segment, whereas Kafka stops there.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

from protocol.records.record_batch import NO_TIMESTAMP, iterate_batches
from protocol.records.record_reader import first_record_at_or_after, read_records
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.retry import SegmentDeletedError
from tiers.segment.indexes.segment_index import SegmentIndex

_SEGMENTS_BETWEEN_YIELDS = 256


class TimestampOffset(NamedTuple):
    """A record's timestamp and offset, and the leader epoch of its batch; -1 when the batch has none."""

    timestamp_ms: int
    offset: int
    leader_epoch: int


class SegmentParts(Protocol):
    """The methods of `RemoteLogReader` that a search needs."""

    async def index(
        self, segment: RemoteLogSegmentMetadata, *, deadline_ms: int, connection_id: int
    ) -> SegmentIndex: ...

    async def chunk(
        self,
        segment: RemoteLogSegmentMetadata,
        index: SegmentIndex,
        number: int,
        *,
        deadline_ms: int,
        connection_id: int,
    ) -> memoryview: ...


class RemoteLogOffsetReader:
    def __init__(self, rlmm: RemoteLogMetadataState, reader: SegmentParts) -> None:
        self._rlmm = rlmm
        self._reader = reader

    async def offset_for_timestamp(
        self,
        partition: TopicIdPartition,
        timestamp_ms: int,
        from_offset: int,
        to_offset: int,
        *,
        deadline_ms: int,
        connection_id: int,
    ) -> TimestampOffset | None:
        """Returns the first record in `[from_offset, to_offset)` with at least that timestamp.

        Control records count as well. None means that the range has no such record. If a segment cannot be read, it
        raises like `RemoteLogReader.read`.
        """
        offset = from_offset
        looked_at = 0
        while (segment := self._rlmm.next_segment(partition, offset)) is not None and segment.start_offset < to_offset:
            if segment.max_timestamp_ms >= timestamp_ms:
                try:
                    found = await self._search(segment, timestamp_ms, from_offset, deadline_ms, connection_id)
                except SegmentDeletedError:
                    continue
                if found is not None:
                    return found if found.offset < to_offset else None
            offset = segment.valid_end_offset + 1
            looked_at += 1
            if looked_at % _SEGMENTS_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
        return None

    async def max_timestamp(
        self,
        partition: TopicIdPartition,
        from_offset: int,
        to_offset: int,
        *,
        deadline_ms: int,
        connection_id: int,
    ) -> TimestampOffset | None:
        """Returns the first record with the greatest timestamp, control records included; None when there is none.

        The search covers the segments that begin in `[from_offset, to_offset)`, and the part from `from_offset` on of
        the segment that holds `from_offset`. Raises like `RemoteLogReader.read`, and `SegmentDeletedError`."""
        best: RemoteLogSegmentMetadata | None = None
        found: TimestampOffset | None = None
        offset = from_offset
        looked_at = 0
        while (segment := self._rlmm.next_segment(partition, offset)) is not None and segment.start_offset < to_offset:
            if segment.start_offset < from_offset or segment.cut_at is not None:
                part = await self._max_of_part(segment, from_offset, deadline_ms, connection_id)
                if part is not None and (found is None or part.timestamp_ms > found.timestamp_ms):
                    found = part
            elif best is None or segment.max_timestamp_ms > best.max_timestamp_ms:
                best = segment
            offset = segment.valid_end_offset + 1
            looked_at += 1
            if looked_at % _SEGMENTS_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
        if (
            best is None
            or best.max_timestamp_ms < 0
            or (found is not None and (-found.timestamp_ms, found.offset) < (-best.max_timestamp_ms, best.start_offset))
        ):
            return found
        return await self._search(best, best.max_timestamp_ms, from_offset, deadline_ms, connection_id)

    async def _max_of_part(
        self, segment: RemoteLogSegmentMetadata, from_offset: int, deadline_ms: int, connection_id: int
    ) -> TimestampOffset | None:
        """Returns the first record with the greatest timestamp in the valid part of the segment from `from_offset` on.

        The segment's maximum timestamp may lie before `from_offset` or after a CUT. So this looks at the chunks, and
        then at the batches and records of chunks that lie only partly in the range."""
        index = await self._reader.index(segment, deadline_ms=deadline_ms, connection_id=connection_id)
        end_offset, greatest_ms = segment.valid_end_offset, NO_TIMESTAMP
        for number, chunk in enumerate(index.chunks()):
            if chunk.last_offset < from_offset or chunk.first_offset > end_offset:
                continue
            if chunk.first_offset >= from_offset and chunk.last_offset <= end_offset:
                greatest_ms = max(greatest_ms, chunk.max_timestamp_ms)
                continue
            view = await self._reader.chunk(
                segment, index, number, deadline_ms=deadline_ms, connection_id=connection_id
            )
            greatest_ms = max(greatest_ms, await asyncio.to_thread(_max_in_chunk, view, from_offset, end_offset))
        if greatest_ms < 0:
            return None
        return await self._search(segment, greatest_ms, from_offset, deadline_ms, connection_id)

    async def _search(
        self,
        segment: RemoteLogSegmentMetadata,
        timestamp_ms: int,
        from_offset: int,
        deadline_ms: int,
        connection_id: int,
    ) -> TimestampOffset | None:
        index = await self._reader.index(segment, deadline_ms=deadline_ms, connection_id=connection_id)
        number = index.chunk_number_for_timestamp(timestamp_ms)
        while number is not None:
            if index.chunks()[number].last_offset >= from_offset:
                view = await self._reader.chunk(
                    segment, index, number, deadline_ms=deadline_ms, connection_id=connection_id
                )
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
