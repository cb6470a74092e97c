"""The founding remote log index, with one entry per chunk, and the `SegmentIndex` made of it.

    magic int16 = 0 | length int16 = 42 + n | crc int32 = CRC-32 of the rest | firstOffset int64 | lastOffset int64
    | firstTimestamp int64 | lastTimestamp int64 | dataLength int32 | rdiLength int16 = n | rdi

The format is in docs/semantics.md 10.1.

* `lastTimestamp` is the chunk's *maximum* timestamp: timestamps are not monotonic, and a look-up must not miss one.
* `dataLength` counts the chunk's log bytes. The RDI has the position and the length of the stored bytes, which differ
  from the log bytes when the chunks are encrypted.
* An RDI consists of version int8 = 0, stored position int64, stored length int32, CRC-32C uint32 of the log bytes.
* The decoder drops a torn tail, which a crash during an append leaves. It treats an unknown magic and a CRC mismatch
  as corruption.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple, Protocol

from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.segment.indexes.segment_index import AbortedTransactionRange, Chunk
from tiers.segment.transactions import overlapping

MAGIC = 0
_PREFIX = Struct(">hhI")
_BODY = Struct(">qqqqih")
_CRC_FROM = _PREFIX.size
_LENGTH_FROM = 4
_RDI_FROM = _PREFIX.size + _BODY.size
_FIXED_LENGTH = _RDI_FROM - _LENGTH_FROM
ENTRY_BYTES_WITHOUT_RDI = _RDI_FROM
MAX_RDI_BYTES = 2**15 - 1 - _FIXED_LENGTH

_RDI = Struct(">bqiI")
_RDI_VERSION = 0


class RemoteLogIndexEntry(NamedTuple):
    """One entry. Both offsets are inclusive. `last_timestamp_ms` is the maximum. `data_length` counts log bytes."""

    first_offset: int
    last_offset: int
    first_timestamp_ms: int
    last_timestamp_ms: int
    data_length: int
    rdi: bytes


def encode_entry(entry: RemoteLogIndexEntry) -> bytes:
    if len(entry.rdi) > MAX_RDI_BYTES:
        raise ValueError(f"an RDI of {len(entry.rdi)} bytes exceeds the maximum of {MAX_RDI_BYTES}")
    body = _BODY.pack(*entry[:5], len(entry.rdi)) + entry.rdi
    return _PREFIX.pack(MAGIC, _FIXED_LENGTH + len(entry.rdi), zlib.crc32(body)) + body


def decode_entries(data: bytes | memoryview) -> tuple[list[RemoteLogIndexEntry], int]:
    """Returns the entries and their total size in bytes. The bytes after them are a torn append, to be truncated.

    Raises `CorruptSegmentError` for an unknown magic, a CRC mismatch, lengths that contradict each other, or last
    offsets that do not increase.
    """
    view = memoryview(data)
    entries: list[RemoteLogIndexEntry] = []
    pos = 0
    while len(view) - pos >= _PREFIX.size:
        magic, length, crc = _PREFIX.unpack_from(view, pos)
        if magic != MAGIC or length < _FIXED_LENGTH:
            raise CorruptSegmentError(f"remote log index entry at {pos}: magic {magic} or length {length} is invalid")
        end = pos + _LENGTH_FROM + length
        if end > len(view):
            break
        if zlib.crc32(view[pos + _CRC_FROM : end]) != crc:
            raise CorruptSegmentError(f"remote log index entry at {pos}: CRC mismatch")
        first, last, first_ms, last_ms, data_length, rdi_length = _BODY.unpack_from(view, pos + _CRC_FROM)
        if pos + _RDI_FROM + rdi_length != end:
            raise CorruptSegmentError(
                f"remote log index entry at {pos}: an RDI of {rdi_length} bytes does not match the length {length}"
            )
        entry = RemoteLogIndexEntry(first, last, first_ms, last_ms, data_length, bytes(view[pos + _RDI_FROM : end]))
        if entries and entry.last_offset <= entries[-1].last_offset:
            raise CorruptSegmentError(
                f"remote log index entry at {pos}: last offset {entry.last_offset} after {entries[-1].last_offset}"
            )
        entries.append(entry)
        pos = end
    return entries, pos


def entry_of_chunk(chunk: Chunk) -> RemoteLogIndexEntry:
    """Returns the chunk's entry. Raises `ValueError` when the chunk has no checksum; a built chunk always has one."""
    if chunk.crc32c is None:
        raise ValueError("cannot index a chunk without a checksum")
    return RemoteLogIndexEntry(
        chunk.first_offset,
        chunk.last_offset,
        chunk.first_timestamp_ms,
        chunk.max_timestamp_ms,
        chunk.log_bytes,
        _RDI.pack(_RDI_VERSION, chunk.stored_position, chunk.stored_bytes, chunk.crc32c),
    )


def chunk_of_entry(entry: RemoteLogIndexEntry) -> Chunk:
    """Returns the entry's chunk. Raises `CorruptSegmentError` when its RDI has another format."""
    if len(entry.rdi) != _RDI.size or entry.rdi[0] != _RDI_VERSION:
        raise CorruptSegmentError(f"a remote data identifier of {len(entry.rdi)} bytes has an unknown format")
    _, stored_position, stored_bytes, crc32c = _RDI.unpack(entry.rdi)
    return Chunk(
        entry.first_offset,
        entry.last_offset,
        entry.first_timestamp_ms,
        entry.last_timestamp_ms,
        stored_position,
        stored_bytes,
        entry.data_length,
        crc32c,
    )


def encode_remote_log_index(chunks: Iterable[Chunk]) -> bytes:
    return b"".join([encode_entry(entry_of_chunk(chunk)) for chunk in chunks])


def chunks_of_segment(entries: Iterable[RemoteLogIndexEntry]) -> list[Chunk]:
    """Returns the chunks of the entries.

    Raises `CorruptSegmentError` unless the stored chunks begin at position 0 and follow each other without gaps.
    """
    chunks = [chunk_of_entry(entry) for entry in entries]
    position = 0
    for chunk in chunks:
        if chunk.stored_position != position or chunk.stored_bytes <= 0 or chunk.log_bytes <= 0:
            raise CorruptSegmentError(f"remote log index: found {chunk} where position {position} is expected")
        position += chunk.stored_bytes
    return chunks


def check_whole_segment(chunks: Sequence[Chunk], metadata: RemoteLogSegmentMetadata) -> None:
    """Raises `CorruptSegmentError` unless the chunks cover exactly the segment's log."""
    log_bytes = sum(chunk.log_bytes for chunk in chunks)
    if not chunks or log_bytes != metadata.segment_size_bytes or chunks[-1].last_offset != metadata.end_offset:
        raise CorruptSegmentError(
            f"remote log index: {len(chunks)} chunks of {log_bytes} bytes for a segment of "
            f"{metadata.segment_size_bytes} bytes, {metadata.segment_id.id}"
        )


class ChunkCipher(Protocol):
    """The cipher of one encrypted segment."""

    def open(self, number: int, stored: bytes | memoryview) -> bytes:
        """Returns the log bytes of the chunk with that number. Raises `CorruptSegmentError`."""


class RemoteLogIndex:
    """The `SegmentIndex` made of remote log index entries. Every bound in a chunk is exact."""

    __slots__ = ("_aborted", "_chunks", "_cipher", "_last_offsets", "_leader_epochs", "_max_timestamps")

    def __init__(
        self,
        chunks: Iterable[Chunk],
        aborted: Sequence[AbortedTransactionRange],
        leader_epochs: tuple[LeaderEpochEntry, ...],
        cipher: ChunkCipher | None = None,
    ) -> None:
        self._chunks = tuple(chunks)
        self._last_offsets = [chunk.last_offset for chunk in self._chunks]
        self._max_timestamps = [chunk.max_timestamp_ms for chunk in self._chunks]
        self._aborted = aborted
        self._leader_epochs = leader_epochs
        self._cipher = cipher

    @classmethod
    def decode(
        cls,
        data: bytes | memoryview,
        aborted: Sequence[AbortedTransactionRange],
        leader_epochs: tuple[LeaderEpochEntry, ...],
        cipher: ChunkCipher | None = None,
    ) -> RemoteLogIndex:
        """Decodes the index of one segment. Raises `CorruptSegmentError`.

        A torn entry at the end is corruption as well, because this index is written at once and never appended to.
        """
        entries, size_bytes = decode_entries(data)
        if size_bytes != len(data):
            raise CorruptSegmentError(f"remote log index: found {len(data) - size_bytes} bytes after the last entry")
        return cls(chunks_of_segment(entries), aborted, leader_epochs, cipher)

    def chunks(self) -> tuple[Chunk, ...]:
        return self._chunks

    def chunk_number_for_offset(self, offset: int) -> int | None:
        number = bisect_left(self._last_offsets, offset)
        return number if number < len(self._chunks) else None

    def chunk_number_for_timestamp(self, timestamp_ms: int, from_chunk: int = 0) -> int | None:
        timestamps = self._max_timestamps
        for number in range(from_chunk, len(timestamps)):
            if timestamps[number] >= timestamp_ms:
                return number
        return None

    def aborted_transactions(self, first_offset: int, last_offset: int) -> list[AbortedTransactionRange]:
        return overlapping(self._aborted, first_offset, last_offset)

    def open_chunk(self, number: int, stored: memoryview) -> memoryview:
        return stored if self._cipher is None else memoryview(self._cipher.open(number, stored))

    def leader_epochs(self) -> tuple[LeaderEpochEntry, ...]:
        return self._leader_epochs
