"""Encodes and decodes `.index`, Kafka's offset index, with one entry per 4096 bytes of log (docs/semantics.md 10).

An entry is (last offset of a batch - base offset, start position of that batch), both int32, both strictly increasing.
The file has no checksum. An inconsistent file must be rebuilt from the log.
"""

from __future__ import annotations

from bisect import bisect_right
from struct import Struct
from typing import NamedTuple

from tiers.errors import CorruptSegmentError

_ENTRY = Struct(">ii")
ENTRY_BYTES = _ENTRY.size
MAX_RELATIVE = 2**31 - 1
"""The largest relative offset and the largest position that an entry can hold."""


class OffsetPosition(NamedTuple):
    """The batch that ends at `offset` (inclusive) starts at `position`."""

    offset: int
    position: int


def encode_offset_index(base_offset: int, entries: list[OffsetPosition]) -> bytes:
    return b"".join([_ENTRY.pack(entry.offset - base_offset, entry.position) for entry in entries])


def decode_offset_index(base_offset: int, data: bytes | memoryview) -> list[OffsetPosition]:
    """Decodes the file. Raises `CorruptSegmentError` for a partial entry and for entries that do not increase."""
    if len(data) % ENTRY_BYTES:
        raise CorruptSegmentError(f"offset index: {len(data)} bytes are not a multiple of {ENTRY_BYTES}")
    entries: list[OffsetPosition] = []
    last = (-1, -1)
    for relative, position in _ENTRY.iter_unpack(data):
        if relative <= last[0] or position <= last[1]:
            raise CorruptSegmentError(f"offset index entry {len(entries)}: ({relative}, {position}) follows {last}")
        last = (relative, position)
        entries.append(OffsetPosition(base_offset + relative, position))
    return entries


def look_up_offset(entries: list[OffsetPosition], base_offset: int, offset: int) -> OffsetPosition:
    """Returns the entry from which to scan the log for `offset`.

    This is the greatest entry whose offset is at most `offset`; `(base_offset, 0)` when there is none.
    """
    number = bisect_right(entries, offset, key=_offset_of)
    return entries[number - 1] if number else OffsetPosition(base_offset, 0)


def _offset_of(entry: OffsetPosition) -> int:
    return entry.offset
