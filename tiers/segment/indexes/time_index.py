"""Encodes `.timeindex`, Kafka's time index: the increases of the log's maximum timestamp.

See docs/semantics.md 10.

An entry is (maximum timestamp so far int64, last offset of the batch that holds it - base offset int32). The builder
tries to add an entry with every offset index entry and at the end of the segment. It adds the entry only if the
timestamp is above that of the last entry.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

_ENTRY = Struct(">qi")


class TimestampOffset(NamedTuple):
    """No batch before the one that ends at `offset` (inclusive) has a maximum timestamp as high as `timestamp_ms`."""

    timestamp_ms: int
    offset: int


def encode_time_index(base_offset: int, entries: list[TimestampOffset]) -> bytes:
    return b"".join([_ENTRY.pack(entry.timestamp_ms, entry.offset - base_offset) for entry in entries])
