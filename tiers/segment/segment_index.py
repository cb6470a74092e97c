"""`SegmentIndex`: from an offset or a timestamp to the chunks of one segment that a reader must fetch.

Two implementations, one contract test: `RemoteLogIndex` (the founding format, one entry per chunk, default; its RDI
says where the stored bytes lie, so it also works when they are not the log's bytes) and `KafkaSegmentIndex`
(Kafka's own .index and .timeindex).

`RemoteLogIndex` is exact. Kafka's files are not: there a chunk's `last_offset` and `max_timestamp_ms` are upper bounds.
So a reader that does not find what it wants in the chunk named goes on to the next; it never has to go back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tiers.model.segment_metadata import LeaderEpochEntry


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole batches that one GET can read.

    `[stored_position, stored_position + stored_bytes)` is what the store holds, `log_bytes` what it decodes to;
    `crc32c` covers the log bytes (None: the index does not know it). Offsets are inclusive. `first_timestamp_ms` is -1
    when the index does not know it.
    """

    first_offset: int
    last_offset: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    stored_position: int
    stored_bytes: int
    log_bytes: int
    crc32c: int | None


@dataclass(frozen=True, slots=True)
class AbortedTransactionRange:
    """An aborted transaction that overlaps the segment; `last_offset` is that of its ABORT marker, 2^63-1 while the
    marker is not copied (semantics 7)."""

    producer_id: int
    first_offset: int
    last_offset: int


class SegmentIndex(Protocol):
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, ascending, together the whole segment."""

    def chunk_number_for_offset(self, offset: int) -> int | None:
        """The number of the first chunk whose `last_offset` >= `offset`; None above the segment's end."""

    def chunk_number_for_timestamp(self, timestamp_ms: int, from_chunk: int = 0) -> int | None:
        """The first chunk number from `from_chunk` on whose `max_timestamp_ms` >= `timestamp_ms`, else None."""

    def aborted_transactions(self, first_offset: int, last_offset: int) -> list[AbortedTransactionRange]:
        """Those that overlap `[first_offset, last_offset]`, by ascending first offset, without duplicates."""

    def open_chunk(self, number: int, stored: memoryview) -> memoryview:
        """The log bytes of a chunk from its stored bytes: themselves, or decrypted. Raises `CorruptSegmentError`.

        What comes out is still to be held against the chunk's checksum."""

    def leader_epochs(self) -> tuple[LeaderEpochEntry, ...]:
        """Every epoch known at the segment's end, earlier segments' included (cumulative)."""
