"""Kafka's `.index` and `.timeindex` files of a segment.

See docs/semantics.md 10.

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

from collections.abc import Iterable
from struct import Struct

INDEX_INTERVAL_BYTES = 4096
OFFSET_ENTRY = Struct(">ii")
MAX_RELATIVE = 2**31 - 1
"""The largest relative offset and the largest position that an entry can hold."""
_TIME_ENTRY = Struct(">qi")


def encode_offset_index(base_offset: int, entries: Iterable[tuple[int, int]]) -> bytes:
    """Encodes pairs of the offset (inclusive) at which a batch ends, and the position at which it starts."""
    return b"".join([OFFSET_ENTRY.pack(offset - base_offset, position) for offset, position in entries])


def encode_time_index(base_offset: int, entries: Iterable[tuple[int, int]]) -> bytes:
    """Encodes pairs of a timestamp, and the offset at which the first batch with so high a maximum ends (inclusive)."""
    return b"".join([_TIME_ENTRY.pack(timestamp_ms, offset - base_offset) for timestamp_ms, offset in entries])
