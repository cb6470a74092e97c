"""The founding remote log index, `SegmentIndex`, which finds chunks by it, and Kafka's own two indexes.

The remote log index has one entry per chunk:

    magic int16 = 0 | length int16 = 42 + n | crc int32 = CRC-32 of the rest | firstOffset int64 | lastOffset int64
    | firstTimestamp int64 | lastTimestamp int64 | dataLength int32 | rdiLength int16 = n | rdi

The format is in docs/semantics.md 10.1.

* `lastTimestamp` is the chunk's *maximum* timestamp: timestamps are not monotonic, and a look-up must not miss one.
* `dataLength` counts the chunk's log bytes. The RDI has the position and the length of the stored bytes, which differ
  from the log bytes when the chunks are encrypted.
* An RDI consists of version int8, stored position int64, stored length int32, CRC-32C uint32 of the log bytes, and of a
  tail. Version 0 has no tail; the local index files have version 1.
* The decoder drops a torn entry at the end, which a crash during an append leaves. Anything else is corruption.

Kafka's `.index` and `.timeindex` files of a segment (docs/semantics.md 10):

* The offset index has one entry per 4096 bytes of log: (last offset of a batch - base offset, start position of that
  batch), both int32, both strictly increasing.
* The time index has the increases of the log's maximum timestamp. An entry is (maximum timestamp so far int64, last
  offset of the batch that holds it - base offset int32). `IndexBuilder` tries to add an entry with every offset index
  entry and at the end of the segment. It adds the entry only if the timestamp is above that of the last entry.
* The files have no checksum. An inconsistent file must be rebuilt from the log.
* The builder follows the rules of Kafka's LogSegment.append. Equal logs always give equal files.

Entries count offsets from the segment's base offset. But a segment may begin with a hole that is longer than an int32.
Then they count from the last offset of the first batch.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from struct import Struct

from protocol.records.record_batch import crc32c
from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata

_MAGIC = 0
_PREFIX = Struct(">hhI")
_BODY = Struct(">qqqqihbqiI")
_RDI_BYTES = Struct(">bqiI").size
_LENGTH_FROM = 4
_BEFORE_RDI = _PREFIX.size + _BODY.size - _RDI_BYTES
ENTRY_BYTES = _BEFORE_RDI + _RDI_BYTES
"""The size of an entry without a tail."""

INDEX_INTERVAL_BYTES = 4096
OFFSET_ENTRY = Struct(">ii")
MAX_RELATIVE = 2**31 - 1
"""The largest relative offset and the largest position that an entry of Kafka's indexes can hold."""
_TIME_ENTRY = Struct(">qi")
_RANGE = Struct(">qqq")

OpenChunk = Callable[[int, bytes | memoryview], bytes]
"""Returns the log bytes of the encrypted chunk with that number. Raises `CorruptSegmentError`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole batches that one GET can read.

    The store holds the chunk at `[stored_position, stored_position + stored_bytes)` of the object; `log_bytes` is its
    size in the log, and `crc32c` covers the log bytes. Offsets are inclusive.
    """

    first_offset: int
    last_offset: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    stored_position: int
    stored_bytes: int
    log_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class AbortedTransactionRange:
    """An aborted transaction that overlaps the segment (docs/semantics.md 7).

    `last_offset` is the offset of its ABORT marker; 2^63-1 if that marker lies beyond the segment."""

    producer_id: int
    first_offset: int
    last_offset: int


def encode_chunk(chunk: Chunk, version: int = 0, tail: bytes = b"") -> bytes:
    """Returns the entry of a chunk, whose RDI has that version and tail."""
    offsets = chunk.first_offset, chunk.last_offset, chunk.first_timestamp_ms, chunk.max_timestamp_ms
    stored = chunk.stored_position, chunk.stored_bytes, chunk.crc32c
    rdi_bytes = _RDI_BYTES + len(tail)
    body = _BODY.pack(*offsets, chunk.log_bytes, rdi_bytes, version, *stored) + tail
    return _PREFIX.pack(_MAGIC, _BEFORE_RDI - _LENGTH_FROM + rdi_bytes, zlib.crc32(body)) + body


def decode_chunks(
    data: bytes | memoryview, version: int = 0, tail_bytes: int = 0
) -> tuple[list[tuple[Chunk, bytes]], int]:
    """Returns the chunks with the tails of their RDIs, and the total size of the entries. The rest is a torn append.

    Raises `CorruptSegmentError` for a CRC mismatch, last offsets that do not increase, and any other format."""
    view = memoryview(data)
    found: list[tuple[Chunk, bytes]] = []
    pos = 0
    last_offset: int | None = None
    while len(view) - pos >= _PREFIX.size:
        magic, length, crc = _PREFIX.unpack_from(view, pos)
        if magic != _MAGIC or length < _BEFORE_RDI - _LENGTH_FROM:
            raise CorruptSegmentError(f"remote log index entry at {pos}: magic {magic} or length {length} is invalid")
        end = pos + _LENGTH_FROM + length
        if end > len(view):
            break
        if zlib.crc32(view[pos + _PREFIX.size : end]) != crc:
            raise CorruptSegmentError(f"remote log index entry at {pos}: CRC mismatch")
        if end - pos != ENTRY_BYTES + tail_bytes:
            raise CorruptSegmentError(f"remote log index entry at {pos}: an RDI of {end - pos - _BEFORE_RDI} bytes")
        first, last, first_ms, max_ms, log_bytes, rdi_bytes, kind, position, stored_bytes, checksum = _BODY.unpack_from(
            view, pos + _PREFIX.size
        )
        if (rdi_bytes, kind) != (_RDI_BYTES + tail_bytes, version):
            raise CorruptSegmentError(
                f"remote log index entry at {pos}: an RDI of {rdi_bytes} bytes and version {kind} is not known"
            )
        if last_offset is not None and last <= last_offset:
            raise CorruptSegmentError(f"remote log index entry at {pos}: last offset {last} after {last_offset}")
        last_offset = last
        chunk = Chunk(first, last, first_ms, max_ms, position, stored_bytes, log_bytes, checksum)
        found.append((chunk, bytes(view[pos + ENTRY_BYTES : end])))
        pos = end
    return found, pos


def encode_remote_log_index(chunks: Iterable[Chunk]) -> bytes:
    return b"".join(map(encode_chunk, chunks))


def decode_remote_log_index(data: bytes | memoryview) -> tuple[Chunk, ...]:
    """Returns the chunks of the index of one segment, which is written at once. Raises `CorruptSegmentError`."""
    found, size_bytes = decode_chunks(data)
    if size_bytes != len(data):
        raise CorruptSegmentError(f"remote log index: found {len(data) - size_bytes} bytes after the last entry")
    return tuple(chunk for chunk, _ in found)


def encode_offset_index(base_offset: int, entries: Iterable[tuple[int, int]]) -> bytes:
    """Encodes pairs of the offset (inclusive) at which a batch ends, and the position at which it starts."""
    return b"".join([OFFSET_ENTRY.pack(offset - base_offset, position) for offset, position in entries])


def encode_time_index(base_offset: int, entries: Iterable[tuple[int, int]]) -> bytes:
    """Encodes pairs of a timestamp, and the offset at which the first batch with so high a maximum ends (inclusive)."""
    return b"".join([_TIME_ENTRY.pack(timestamp_ms, offset - base_offset) for timestamp_ms, offset in entries])


def check_whole_segment(chunks: Sequence[Chunk], metadata: RemoteLogSegmentMetadata) -> None:
    """Raises `CorruptSegmentError` unless the stored chunks follow each other and are exactly the segment's log."""
    position = 0
    for chunk in chunks:
        if chunk.stored_position != position or chunk.stored_bytes <= 0 or chunk.log_bytes <= 0:
            raise CorruptSegmentError(f"remote log index: found {chunk} where position {position} is expected")
        position += chunk.stored_bytes
    log_bytes = sum(chunk.log_bytes for chunk in chunks)
    if not chunks or log_bytes != metadata.segment_size_bytes or chunks[-1].last_offset != metadata.end_offset:
        raise CorruptSegmentError(
            f"remote log index: {len(chunks)} chunks of {log_bytes} bytes for a segment of "
            f"{metadata.segment_size_bytes} bytes, {metadata.segment_id.id}"
        )


def encode_aborted_ranges(ranges: Iterable[AbortedTransactionRange]) -> bytes:
    return b"".join([_RANGE.pack(one.producer_id, one.first_offset, one.last_offset) for one in ranges])


def decode_aborted_ranges(data: bytes | memoryview) -> tuple[AbortedTransactionRange, ...]:
    if len(data) % _RANGE.size:
        raise CorruptSegmentError(f"aborted transactions: {len(data)} bytes are not a multiple of {_RANGE.size}")
    ranges = tuple(AbortedTransactionRange(*fields) for fields in _RANGE.iter_unpack(data))
    for one in ranges:
        if one.last_offset < one.first_offset:
            raise CorruptSegmentError(f"an aborted transaction ends before it starts: {one}")
    return ranges


def overlapping(
    ranges: Iterable[AbortedTransactionRange], first_offset: int, last_offset: int
) -> list[AbortedTransactionRange]:
    """Returns the ranges that overlap `[first_offset, last_offset]`.

    They are in ascending order of their first offsets, and each pair of producer id and first offset occurs once.
    Clients rely on these three properties (docs/semantics.md 7, emission rules). `first_offset` must be the first
    offset of the first returned batch. The caller may pass the ranges of several segments: of two entries for one
    transaction, the one with the lower last offset stays, which is the one that knows the marker.
    """
    found: dict[tuple[int, int], AbortedTransactionRange] = {}
    for one in ranges:
        if one.last_offset < first_offset or one.first_offset > last_offset:
            continue
        key = (one.first_offset, one.producer_id)
        known = found.get(key)
        if known is None or one.last_offset < known.last_offset:
            found[key] = one
    return [found[key] for key in sorted(found)]


class SegmentIndex:
    """Finds the chunks of one segment that a reader must fetch for an offset or a timestamp.

    `open_chunk` is None if the stored bytes are the log's bytes."""

    __slots__ = ("_aborted", "_chunks", "_last_offsets", "_leader_epochs", "_open_chunk")

    def __init__(
        self,
        chunks: Iterable[Chunk],
        aborted: Sequence[AbortedTransactionRange],
        leader_epochs: tuple[LeaderEpochEntry, ...],
        open_chunk: OpenChunk | None = None,
    ) -> None:
        self._chunks = tuple(chunks)
        self._last_offsets = [chunk.last_offset for chunk in self._chunks]
        self._aborted = aborted
        self._leader_epochs = leader_epochs
        self._open_chunk = open_chunk

    def chunks(self) -> tuple[Chunk, ...]:
        """Returns all chunks in ascending order. Together they are the whole segment."""
        return self._chunks

    def chunk_number_for_offset(self, offset: int) -> int | None:
        """Returns the number of the first chunk whose `last_offset` >= `offset`; None above the segment's end."""
        number = bisect_left(self._last_offsets, offset)
        return number if number < len(self._chunks) else None

    def chunk_number_for_timestamp(self, timestamp_ms: int, from_chunk: int = 0) -> int | None:
        """Returns the number of the first chunk from `from_chunk` on with a `max_timestamp_ms` >= `timestamp_ms`."""
        numbers = range(from_chunk, len(self._chunks))
        return next((each for each in numbers if self._chunks[each].max_timestamp_ms >= timestamp_ms), None)

    def aborted_transactions(self, first_offset: int, last_offset: int) -> list[AbortedTransactionRange]:
        """Returns the aborted transactions that overlap `[first_offset, last_offset]`, as `overlapping` does."""
        return overlapping(self._aborted, first_offset, last_offset)

    def open_chunk(self, number: int, stored: memoryview) -> memoryview:
        """Returns the log bytes of a chunk: `stored` itself, or the decrypted bytes.

        Raises `CorruptSegmentError` when they are not what was written."""
        chunk = self._chunks[number]
        log_bytes = stored if self._open_chunk is None else memoryview(self._open_chunk(number, stored))
        if len(log_bytes) != chunk.log_bytes or crc32c(log_bytes, 0, len(log_bytes)) != chunk.crc32c:
            raise CorruptSegmentError(
                f"the chunk with offsets {chunk.first_offset} to {chunk.last_offset}, at {chunk.stored_position}, "
                "is not what was stored"
            )
        return log_bytes

    def leader_epochs(self) -> tuple[LeaderEpochEntry, ...]:
        """Returns every leader epoch known at the segment's end, including those of earlier segments (cumulative)."""
        return self._leader_epochs
