"""`KafkaSegmentIndex`: the `SegmentIndex` made of Kafka's own `.index` and `.timeindex`.

Kafka's entries hold the *last* offset of a batch and its *start* position. So the last offset of a chunk and its
maximum timestamp are known only as upper bounds. Therefore it differs from `RemoteLogIndex`:

* `last_offset` may be too high by less than one batch. A reader that finds no batch with the wanted offset in the
  chunk continues with the next chunk, as Kafka does when it scans forward from an index entry.
* `max_timestamp_ms` is an upper bound for every batch up to the chunk's end. `first_timestamp_ms` is unknown and -1.
* A chunk has no checksum. Readers verify each batch by its own CRC.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.offset_index import decode_offset_index
from tiers.segment.indexes.segment_index import AbortedTransactionRange, Chunk
from tiers.segment.indexes.time_index import TimestampOffset, decode_time_index
from tiers.segment.indexes.transaction_index import overlapping

UNKNOWN_TIMESTAMP_MS = -1


class KafkaSegmentIndex:
    """A `SegmentIndex` with chunks of about `chunk_bytes`, which end where the offset index has an entry.

    The stored bytes must be the log's bytes."""

    __slots__ = ("_aborted", "_chunks", "_last_offsets", "_leader_epochs")

    def __init__(
        self,
        base_offset: int,
        end_offset: int,
        segment_size_bytes: int,
        offset_index: bytes | memoryview,
        time_index: bytes | memoryview,
        aborted: Sequence[AbortedTransactionRange],
        leader_epochs: tuple[LeaderEpochEntry, ...],
        chunk_bytes: int = 1 << 20,
    ) -> None:
        entries = decode_offset_index(base_offset, offset_index)
        times = decode_time_index(base_offset, time_index)
        if entries and (entries[-1].offset > end_offset or entries[-1].position >= segment_size_bytes):
            raise CorruptSegmentError(f"offset index: {entries[-1]} lies beyond the segment's end")
        if times and times[-1].offset > end_offset:
            raise CorruptSegmentError(f"time index: {times[-1]} lies beyond the segment's end")

        cuts: list[tuple[int, int]] = []
        position = 0
        for number, entry in enumerate(entries):
            following = entries[number + 1].position if number + 1 < len(entries) else segment_size_bytes
            if entry.position > position and following - position > chunk_bytes:
                cuts.append((entry.position, entry.offset - 1))
                position = entry.position
        cuts.append((segment_size_bytes, end_offset))

        chunks: list[Chunk] = []
        first_offset, position = base_offset, 0
        for end_position, last_offset in cuts:
            size = end_position - position
            highest = _highest_timestamp_until(times, last_offset)
            chunks.append(Chunk(first_offset, last_offset, UNKNOWN_TIMESTAMP_MS, highest, position, size, size, None))
            first_offset, position = last_offset + 1, end_position
        self._chunks = tuple(chunks)
        self._last_offsets = [chunk.last_offset for chunk in chunks]
        self._aborted = aborted
        self._leader_epochs = leader_epochs

    def chunks(self) -> tuple[Chunk, ...]:
        return self._chunks

    def chunk_number_for_offset(self, offset: int) -> int | None:
        number = bisect_left(self._last_offsets, offset)
        return number if number < len(self._chunks) else None

    def chunk_number_for_timestamp(self, timestamp_ms: int, from_chunk: int = 0) -> int | None:
        for number in range(from_chunk, len(self._chunks)):
            if self._chunks[number].max_timestamp_ms >= timestamp_ms:
                return number
        return None

    def aborted_transactions(self, first_offset: int, last_offset: int) -> list[AbortedTransactionRange]:
        return overlapping(self._aborted, first_offset, last_offset)

    def open_chunk(self, number: int, stored: memoryview) -> memoryview:
        return stored

    def leader_epochs(self) -> tuple[LeaderEpochEntry, ...]:
        return self._leader_epochs


def _highest_timestamp_until(times: list[TimestampOffset], last_offset: int) -> int:
    """Returns an upper bound of the timestamps at offsets up to `last_offset`.

    The maximum reaches an entry's timestamp only at that entry's offset, so all timestamps before it are lower.
    """
    number = bisect_left(times, last_offset + 1, key=_offset_of)
    if number < len(times):
        return times[number].timestamp_ms - 1
    return times[-1].timestamp_ms if times else UNKNOWN_TIMESTAMP_MS


def _offset_of(entry: TimestampOffset) -> int:
    return entry.offset
