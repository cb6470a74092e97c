"""A set of local index files that map offsets to the chunks of a partition's remote segments (docs/semantics.md 10.1).

    <base>.remoteLogIndex       one entry per chunk, segment by segment
    <base>.remoteOffsetIndex    as `.index`: last offset of a chunk - base, position of its entry in remoteLogIndex
    <base>.remoteTimeIndex      as `.timeindex`: highest timestamp so far, last offset of its chunk - base
    <base>.remoteSegments       per segment: length int32 | the other data that a read needs, as checksummed sections

The format is the founding one (docs/founding.md, "Local index files").

* `base` is the start offset of the first segment, in 20 digits. Segments are appended in ascending order of their
  offsets. There may be gaps between them, because a file also holds segments that a client has read.
* An entry's RDI has version 1. It extends the RDI of the segment's own index by the segment's uuid and by the position
  of the segment in remoteSegments: version int8 = 1, stored position int64, stored length int32, CRC-32C uint32,
  segment uuid 16, place int32. So offsets alone never lead to the bytes of another copy attempt.
* `find` starts at the offset index, which is written last and has no checksum. Its entries are only a hint: `find`
  trusts the data behind them only if the checksums match and the chunks form the whole segment of that uuid. So a torn
  append only means that the segment is not found. Every other inconsistency is corruption, and the set must be removed.
* Nothing is synced, because all of it can be fetched again. Calls block on the disk.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from uuid import UUID

from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import (
    IndexesObject,
    Section,
    SegmentCiphers,
    decode_leader_epoch_checkpoint,
    decode_sections,
    encode_leader_epoch_checkpoint,
    encode_sections,
    open_cipher,
)
from tiers.segment.indexes.segment_index import (
    ENTRY_BYTES,
    MAX_RELATIVE,
    OFFSET_ENTRY,
    Chunk,
    SegmentIndex,
    check_whole_segment,
    decode_aborted_ranges,
    decode_chunks,
    encode_aborted_ranges,
    encode_chunk,
    encode_offset_index,
    encode_time_index,
)

LOG_INDEX = ".remoteLogIndex"
OFFSET_INDEX = ".remoteOffsetIndex"
TIME_INDEX = ".remoteTimeIndex"
SEGMENTS = ".remoteSegments"
SUFFIXES = (SEGMENTS, LOG_INDEX, TIME_INDEX, OFFSET_INDEX)
"""The suffixes in the order in which `append` writes the files."""

_RDI_VERSION = 1
_RDI_TAIL = Struct(">16si")
_LENGTH = Struct(">i")
_BLOCK_BYTES = 4096

Append = Callable[[Path, bytes], None]


def append_to(path: Path, content: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        written = file.write(content)
    if written != len(content):
        raise OSError(f"{path}: only {written} of {len(content)} bytes were written")


class LocalIndexFiles:
    """One set of files. `last_offset` is the highest offset in it; `base_offset - 1` for an empty set.

    Every method may raise `OSError` for an error of the disk. After that, only `remove` may be called."""

    def __init__(self, folder: Path, base_offset: int, append: Append = append_to) -> None:
        """Creates a new set. There must be no files with its names."""
        self.folder = folder
        self.base_offset = base_offset
        self.last_offset = base_offset - 1
        self._append = append
        self._highest_timestamp_ms = -1
        self._sizes = dict.fromkeys(SUFFIXES, 0)

    @classmethod
    def existing(cls, folder: Path, base_offset: int) -> LocalIndexFiles:
        """Opens the set of an earlier process, for reading only. Raises `CorruptSegmentError` when it has no entry."""
        files = cls(folder, base_offset)
        files._sizes = {suffix: files.path(suffix).stat().st_size for suffix in SUFFIXES}
        count = files._sizes[OFFSET_INDEX] // OFFSET_ENTRY.size
        if not count:
            raise CorruptSegmentError(f"{files.path(OFFSET_INDEX)}: the offset index has no entry")
        last = _read(files.path(OFFSET_INDEX), (count - 1) * OFFSET_ENTRY.size, OFFSET_ENTRY.size)
        if len(last) < OFFSET_ENTRY.size:  # the writer has begun the set anew meanwhile
            raise CorruptSegmentError(f"{files.path(OFFSET_INDEX)}: the offset index became shorter")
        files.last_offset = base_offset + OFFSET_ENTRY.unpack(last)[0]
        return files

    def path(self, suffix: str) -> Path:
        return self.folder / f"{self.base_offset:020}{suffix}"

    @property
    def size_bytes(self) -> int:
        """The space on the disk, in whole blocks."""
        return sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in self._sizes.values())

    def takes(self, segment: RemoteLogSegmentMetadata, max_bytes: int) -> bool:
        """Returns whether the segment can be appended to this set, whose remoteLogIndex is rolled at `max_bytes`."""
        return (
            self.last_offset < segment.start_offset
            and self._sizes[LOG_INDEX] < max_bytes
            and segment.end_offset - self.base_offset <= MAX_RELATIVE
        )

    def append(self, indexes: IndexesObject) -> None:
        segment = indexes.metadata
        uuid, place, position = segment.segment_id.id, self._sizes[SEGMENTS], self._sizes[LOG_INDEX]
        log_index: list[bytes] = []
        offsets: list[tuple[int, int]] = []
        times: list[tuple[int, int]] = []
        for chunk in indexes.chunks():
            log_index.append(encode_chunk(chunk, _RDI_VERSION, _RDI_TAIL.pack(uuid.bytes, place)))
            offsets.append((chunk.last_offset, position))
            position += len(log_index[-1])
            if chunk.max_timestamp_ms > self._highest_timestamp_ms:
                self._highest_timestamp_ms = chunk.max_timestamp_ms
                times.append((chunk.max_timestamp_ms, chunk.last_offset))
        record = _segment_record(indexes)
        self._write(SEGMENTS, _LENGTH.pack(len(record)) + record)
        self._write(LOG_INDEX, b"".join(log_index))
        self._write(TIME_INDEX, encode_time_index(self.base_offset, times))
        self._write(OFFSET_INDEX, encode_offset_index(self.base_offset, offsets))
        self.last_offset = segment.end_offset

    def _write(self, suffix: str, content: bytes) -> None:
        self._append(self.path(suffix), content)
        self._sizes[suffix] += len(content)

    def find(
        self, segment: RemoteLogSegmentMetadata, ciphers: SegmentCiphers | None = None
    ) -> tuple[SegmentIndex, int] | None:
        """Returns the segment's index and the number of bytes read for it; None when the set lacks the segment.

        Raises `CorruptSegmentError` when the files contradict each other. Raises `EncryptionKeyError` when the segment
        is encrypted and `ciphers` cannot open it.
        """
        if not self.base_offset <= segment.start_offset <= segment.end_offset <= self.last_offset:
            return None
        entries = self._entries(segment)
        uuid = segment.segment_id.id
        if not entries or any(found.uuid != uuid for found in entries):
            return None
        chunks = [each.chunk for each in entries]
        check_whole_segment(chunks, segment)
        sections, size_bytes = self._sections(entries[0].place)
        try:
            owner, aborted, epochs = (bytes(sections[one]) for one in _KEPT)
        except KeyError as error:
            raise CorruptSegmentError(f"{self.path(SEGMENTS)}: section {error} is missing") from error
        if owner != uuid.bytes:
            raise CorruptSegmentError(f"{self.path(SEGMENTS)}: found another segment instead of {uuid}")
        encryption = sections.get(Section.ENCRYPTION)
        index = SegmentIndex(
            chunks,
            decode_aborted_ranges(aborted),
            decode_leader_epoch_checkpoint(epochs),
            open_cipher(uuid, encryption, ciphers),
        )
        return index, size_bytes + len(entries) * (ENTRY_BYTES + _RDI_TAIL.size)

    def _entries(self, segment: RemoteLogSegmentMetadata) -> list[_Entry]:
        """Returns the entries from the first that ends in the segment to the one that ends the segment.

        Returns an empty list when the set does not reach the segment's end.
        """
        raw = self.path(OFFSET_INDEX).read_bytes()
        count = len(raw) // OFFSET_ENTRY.size

        def last_offset(number: int) -> int:
            return self.base_offset + int(OFFSET_ENTRY.unpack_from(raw, number * OFFSET_ENTRY.size)[0])

        first = bisect_left(range(count), segment.start_offset, key=last_offset)
        last = bisect_left(range(count), segment.end_offset, key=last_offset)
        if last == count or first > last:
            return []
        start: int = OFFSET_ENTRY.unpack_from(raw, first * OFFSET_ENTRY.size)[1]
        end: int | None = (
            None if last + 1 == count else OFFSET_ENTRY.unpack_from(raw, (last + 1) * OFFSET_ENTRY.size)[1]
        )
        if start < 0 or (end is not None and end <= start):
            raise CorruptSegmentError(f"{self.path(OFFSET_INDEX)}: the positions {start} and {end} do not ascend")
        entries = _decoded(_read(self.path(LOG_INDEX), start, None if end is None else end - start))
        if len(entries) <= last - first:
            raise CorruptSegmentError(
                f"{self.path(LOG_INDEX)}: has {len(entries)} entries where the offset index has {last - first + 1}"
            )
        return entries[: last - first + 1]

    def _sections(self, place: int) -> tuple[dict[int, memoryview], int]:
        path = self.path(SEGMENTS)
        prefix = _read(path, place, _LENGTH.size)
        length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else -1
        if not 0 <= length <= self._sizes[SEGMENTS]:
            raise CorruptSegmentError(f"{path}: the length {length} at {place} is invalid")
        return decode_sections(_read(path, place + _LENGTH.size, length)), length

    def remove(self) -> None:
        """Removes the files, the offset index first: without it, no process uses the other files."""
        for suffix in reversed(SUFFIXES):
            self.path(suffix).unlink(missing_ok=True)


_KEPT = (Section.METADATA, Section.ABORTED_TRANSACTIONS, Section.LEADER_EPOCH_CHECKPOINT)


def _segment_record(indexes: IndexesObject) -> bytes:
    """Returns the segment's entry in remoteSegments. Of the metadata it keeps only the uuid."""
    kept: dict[int, bytes] = {
        Section.METADATA: indexes.metadata.segment_id.id.bytes,
        Section.ABORTED_TRANSACTIONS: encode_aborted_ranges(indexes.indexes.aborted_transactions),
        Section.LEADER_EPOCH_CHECKPOINT: encode_leader_epoch_checkpoint(indexes.indexes.leader_epochs),
    }
    if indexes.indexes.encryption is not None:
        kept[Section.ENCRYPTION] = bytes(indexes.indexes.encryption)
    return encode_sections(kept)


class _Entry(NamedTuple):
    """An entry of the log index: a chunk, and the place in remoteSegments of its segment."""

    chunk: Chunk
    uuid: UUID
    place: int


def _decoded(log_index: bytes) -> list[_Entry]:
    entries = []
    for chunk, tail in decode_chunks(log_index, _RDI_VERSION, _RDI_TAIL.size)[0]:
        uuid, place = _RDI_TAIL.unpack(tail)
        if place < 0:
            raise CorruptSegmentError(f"local remote log index: the position {place} of a segment is negative")
        entries.append(_Entry(chunk, UUID(bytes=uuid), place))
    return entries


def _read(path: Path, position: int, size: int | None) -> bytes:
    """Reads `size` bytes at `position`, fewer at the end of the file; up to the end when `size` is None."""
    with path.open("rb", buffering=0) as file:
        left = max(0, os.fstat(file.fileno()).st_size - position)
        return os.pread(file.fileno(), left if size is None else min(size, left), position)
