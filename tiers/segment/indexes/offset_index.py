"""Encodes `.index`, Kafka's offset index, with one entry per 4096 bytes of log (docs/semantics.md 10).

An entry is (last offset of a batch - base offset, start position of that batch), both int32, both strictly increasing.
The file has no checksum. An inconsistent file must be rebuilt from the log.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

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
