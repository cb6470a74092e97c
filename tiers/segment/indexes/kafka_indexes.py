"""Kafka's `.index` and `.timeindex` files of a segment, and `KafkaIndexBuilder`, which makes them from its batches.

See docs/semantics.md 10.

* The offset index has one entry per 4096 bytes of log: (last offset of a batch - base offset, start position of that
  batch), both int32, both strictly increasing.
* The time index has the increases of the log's maximum timestamp. An entry is (maximum timestamp so far int64, last
  offset of the batch that holds it - base offset int32). The builder tries to add an entry with every offset index
  entry and at the end of the segment. It adds the entry only if the timestamp is above that of the last entry.
* The files have no checksum. An inconsistent file must be rebuilt from the log.
* The builder follows the rules of Kafka's LogSegment.append. Equal logs always give equal files.

Entries count offsets from the segment's base offset. But a segment may begin with a hole that is longer than an int32.
Then they count from the last offset of the first batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from protocol.records.record_batch import RecordBatch

INDEX_INTERVAL_BYTES = 4096
_OFFSET_ENTRY = Struct(">ii")
OFFSET_ENTRY_BYTES = _OFFSET_ENTRY.size
MAX_RELATIVE = 2**31 - 1
"""The largest relative offset and the largest position that an entry can hold."""
_TIME_ENTRY = Struct(">qi")


class OffsetPosition(NamedTuple):
    """The batch that ends at `offset` (inclusive) starts at `position`."""

    offset: int
    position: int


def encode_offset_index(base_offset: int, entries: list[OffsetPosition]) -> bytes:
    return b"".join([_OFFSET_ENTRY.pack(entry.offset - base_offset, entry.position) for entry in entries])


class TimestampOffset(NamedTuple):
    """No batch before the one that ends at `offset` (inclusive) has a maximum timestamp as high as `timestamp_ms`."""

    timestamp_ms: int
    offset: int


def encode_time_index(base_offset: int, entries: list[TimestampOffset]) -> bytes:
    return b"".join([_TIME_ENTRY.pack(entry.timestamp_ms, entry.offset - base_offset) for entry in entries])


class KafkaIndexBuilder:
    __slots__ = (
        "_base_offset",
        "_bytes_since_last_entry",
        "_last_offset",
        "_max_timestamp_offset",
        "_offset_index",
        "_time_index",
        "first_end_offset",
        "max_timestamp_ms",
        "size_bytes",
    )

    def __init__(self, base_offset: int) -> None:
        self.size_bytes = 0
        self.max_timestamp_ms = -1
        self._base_offset = base_offset
        self._max_timestamp_offset = base_offset
        self._bytes_since_last_entry = 0
        self.first_end_offset: int | None = None
        """The last offset of the first batch; None before the first batch."""
        self._last_offset = base_offset - 1
        self._offset_index: list[OffsetPosition] = []
        self._time_index: list[TimestampOffset] = []

    def extend(self, batches: Sequence[RecordBatch]) -> None:
        """Adds one or more batches. The caller must add every batch, in the log's order."""
        if self.first_end_offset is None:
            self.first_end_offset = batches[0].last_offset
        self._last_offset = batches[-1].last_offset
        max_timestamp_ms = self.max_timestamp_ms
        since_last_entry = self._bytes_since_last_entry
        position = self.size_bytes
        for batch in batches:
            if batch.max_timestamp > max_timestamp_ms:
                self.max_timestamp_ms = max_timestamp_ms = batch.max_timestamp
                self._max_timestamp_offset = batch.last_offset
            if since_last_entry > INDEX_INTERVAL_BYTES:
                self._offset_index.append(OffsetPosition(batch.last_offset, position))
                self._offer_time_entry()
                since_last_entry = 0
            size_bytes = batch.end - batch.start
            since_last_entry += size_bytes
            position += size_bytes
        self._bytes_since_last_entry = since_last_entry
        self.size_bytes = position

    def finish(self) -> tuple[bytes, bytes]:
        """Returns the offset index and the time index. The caller must not add batches afterwards."""
        self._offer_time_entry()
        base_offset = self._base_offset
        if self.first_end_offset is not None and self._last_offset - base_offset > MAX_RELATIVE:
            base_offset = self.first_end_offset
        return encode_offset_index(base_offset, self._offset_index), encode_time_index(base_offset, self._time_index)

    def _offer_time_entry(self) -> None:
        last = self._time_index[-1].timestamp_ms if self._time_index else -1
        if self.max_timestamp_ms > last:
            self._time_index.append(TimestampOffset(self.max_timestamp_ms, self._max_timestamp_offset))
