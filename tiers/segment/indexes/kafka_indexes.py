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

from collections.abc import Iterable, Sequence
from struct import Struct

from protocol.records.record_batch import RecordBatch

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


class KafkaIndexBuilder:
    def __init__(self, base_offset: int) -> None:
        self.size_bytes = 0
        self.max_timestamp_ms = -1
        self._base_offset = base_offset
        self._max_timestamp_offset = base_offset
        self._bytes_since_last_entry = 0
        self.first_end_offset: int | None = None
        """The last offset of the first batch; None before the first batch."""
        self._last_offset = base_offset - 1
        self._offset_index: list[tuple[int, int]] = []
        self._time_index: list[tuple[int, int]] = []

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
                self._offset_index.append((batch.last_offset, position))
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
        last = self._time_index[-1][0] if self._time_index else -1
        if self.max_timestamp_ms > last:
            self._time_index.append((self.max_timestamp_ms, self._max_timestamp_offset))
