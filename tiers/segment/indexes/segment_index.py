"""`SegmentIndex` finds the chunks of one segment that a reader must fetch for an offset or a timestamp.

`RemoteLogIndex` implements it, from the `.indexes` object of the segment or from local files. It uses the founding
format (docs/founding.md, "Remote log index"), with one entry per chunk. The RDI of an entry has the position of the
stored bytes, so the index also works for encrypted segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tiers.model.segment_metadata import LeaderEpochEntry


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole batches that one GET can read.

    The store holds the chunk at `[stored_position, stored_position + stored_bytes)` of the object; `log_bytes` is its
    size in the log. `crc32c` covers the log bytes; None when the index does not know the checksum. Offsets are
    inclusive. `first_timestamp_ms` is -1 when the index does not know it.
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
    """An aborted transaction that overlaps the segment (docs/semantics.md 7).

    `last_offset` is the offset of its ABORT marker; 2^63-1 if that marker lies beyond the segment."""

    producer_id: int
    first_offset: int
    last_offset: int


class SegmentIndex(Protocol):
    def chunks(self) -> tuple[Chunk, ...]:
        """Returns all chunks in ascending order. Together they are the whole segment."""

    def chunk_number_for_offset(self, offset: int) -> int | None:
        """Returns the number of the first chunk whose `last_offset` >= `offset`; None above the segment's end."""

    def chunk_number_for_timestamp(self, timestamp_ms: int, from_chunk: int = 0) -> int | None:
        """Returns the number of the first chunk from `from_chunk` on whose `max_timestamp_ms` >= `timestamp_ms`.

        Returns None when there is no such chunk.
        """

    def aborted_transactions(self, first_offset: int, last_offset: int) -> list[AbortedTransactionRange]:
        """Returns the aborted transactions that overlap `[first_offset, last_offset]`.

        They are in ascending order of their first offsets and without duplicates.
        """

    def open_chunk(self, number: int, stored: memoryview) -> memoryview:
        """Returns the log bytes of a chunk: `stored` itself, or the decrypted bytes. Raises `CorruptSegmentError`.

        The caller must verify the result by the chunk's checksum."""

    def leader_epochs(self) -> tuple[LeaderEpochEntry, ...]:
        """Returns every leader epoch known at the segment's end, including those of earlier segments (cumulative)."""
