"""Encodes and decodes `.timeindex`, Kafka's time index: the increases of the log's maximum timestamp.

See docs/semantics.md 10.

An entry is (maximum timestamp so far int64, last offset of the batch that holds it - base offset int32). The builder
tries to add an entry with every offset index entry and at the end of the segment. It adds the entry only if the
timestamp is above that of the last entry.
"""

from __future__ import annotations

from bisect import bisect_right
from struct import Struct
from typing import NamedTuple

from tiers.errors import CorruptSegmentError

_ENTRY = Struct(">qi")
ENTRY_BYTES = _ENTRY.size


class TimestampOffset(NamedTuple):
    """No batch before the one that ends at `offset` (inclusive) has a maximum timestamp as high as `timestamp_ms`."""

    timestamp_ms: int
    offset: int


def encode_time_index(base_offset: int, entries: list[TimestampOffset]) -> bytes:
    return b"".join([_ENTRY.pack(entry.timestamp_ms, entry.offset - base_offset) for entry in entries])


def decode_time_index(base_offset: int, data: bytes | memoryview) -> list[TimestampOffset]:
    """Decodes the file. Raises `CorruptSegmentError` for a partial entry and for entries that do not increase."""
    if len(data) % ENTRY_BYTES:
        raise CorruptSegmentError(f"time index: {len(data)} bytes are not a multiple of {ENTRY_BYTES}")
    entries: list[TimestampOffset] = []
    last = (-1, -1)
    for timestamp_ms, relative in _ENTRY.iter_unpack(data):
        if timestamp_ms <= last[0] or relative <= last[1]:
            raise CorruptSegmentError(f"time index entry {len(entries)}: ({timestamp_ms}, {relative}) follows {last}")
        last = (timestamp_ms, relative)
        entries.append(TimestampOffset(timestamp_ms, base_offset + relative))
    return entries


def look_up_timestamp(entries: list[TimestampOffset], base_offset: int, timestamp_ms: int) -> TimestampOffset:
    """Returns the entry from which to scan the log for `timestamp_ms`.

    This is the greatest entry whose timestamp is at most `timestamp_ms`; `(-1, base_offset)` when there is none.
    """
    number = bisect_right(entries, timestamp_ms, key=_timestamp_of)
    return entries[number - 1] if number else TimestampOffset(-1, base_offset)


def _timestamp_of(entry: TimestampOffset) -> int:
    return entry.timestamp_ms
