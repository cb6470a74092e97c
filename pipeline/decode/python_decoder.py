"""`PythonDecoder`: decodes records into Arrow arrays without numba. It also decodes the rare magic 0 and 1.

Varints of one and two bytes are decoded inline, because a function call costs more than the decoding. The kernel
follows the same rules:

* A varint has at most ten bytes and 64 bits. A record ends where its length says. A batch's records fill the batch.
* An offset delta lies within the batch's deltas. Base timestamp plus delta overflows like Java's long.
* A negative length means null, except for a header's key, which is never null. Keys that are not UTF-8 are decoded with
  replacement characters.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.decode.record_columns import HEADERS_TYPE, RecordColumns
from protocol.errors import CorruptBatchError
from protocol.primitives import Buffer
from protocol.records.record_batch import NO_TIMESTAMP, RecordBatch
from protocol.records.record_reader import read_records

MAX_TIMESTAMP_MS = ((1 << 63) - 1) // 1000
"""The latest timestamp that fits in 64-bit microseconds. Later timestamps are clipped to it."""
NO_TIMESTAMP_TYPE, CREATE_TIME, LOG_APPEND_TIME = -1, 0, 1


class PythonDecoder:
    """Takes batches until `take` returns their rows. If `add` raises `CorruptBatchError`, the batch adds no rows."""

    def __init__(self, columns: RecordColumns) -> None:
        self._columns = columns
        self._clear()

    def _clear(self) -> None:
        self._offsets: list[int] = []
        self._timestamps: list[int] = []
        self._timestamp_types: list[int] = []
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._header_ends: list[int] = []
        self._header_keys: list[bytes] = []
        self._header_values: list[bytes | None] = []

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, batch: RecordBatch, records: Buffer, first_offset: int, end_offset: int) -> None:
        """Adds the wanted records of one batch. `records` are the decompressed records of a v2 batch. The offsets are
        inclusive."""
        lists: tuple[list[Any], ...] = (
            self._offsets, self._timestamps, self._keys, self._values,
            self._header_ends, self._header_keys, self._header_values,
        )  # fmt: skip
        lengths = [len(one) for one in lists]
        try:
            self._add(batch, bytes(records), first_offset, end_offset)
        except (CorruptBatchError, IndexError) as error:
            for one, length in zip(lists, lengths, strict=True):
                del one[length:]
            if isinstance(error, IndexError):
                raise CorruptBatchError(f"a record beyond {len(records)} bytes") from error
            raise
        self._timestamp_types += [LOG_APPEND_TIME if batch.is_log_append_time else CREATE_TIME] * (
            len(self._offsets) - lengths[0]
        )

    def _add(self, batch: RecordBatch, data: bytes, first_offset: int, end_offset: int) -> None:
        base_offset, base_timestamp = batch.base_offset, batch.base_timestamp
        append_time = batch.max_timestamp if batch.is_log_append_time else None
        last_delta = batch.last_offset - base_offset
        offsets, timestamps, keys, values = self._offsets, self._timestamps, self._keys, self._values
        header_ends, header_keys = self._header_ends, self._header_keys
        long_varint = _long_varint
        is_all_wanted = first_offset <= base_offset and batch.last_offset <= end_offset
        has_headers = "headers" in self._columns
        size = len(data)
        pos = 0
        for _ in range(batch.records_count):
            byte = data[pos]
            if byte < 0x80:
                pos += 1
            elif (high := data[pos + 1]) < 0x80:
                byte += (high << 7) - 0x80
                pos += 2
            else:
                byte, pos = long_varint(data, pos)
            length = byte >> 1 ^ -(byte & 1)
            if not 0 <= length <= size - pos:
                raise CorruptBatchError(f"a record of {length} bytes at {pos} of {size}")
            end = pos + length

            pos += 1  # skips the attributes, which have no meaning
            byte = data[pos]
            if byte < 0x80:
                pos += 1
            elif (high := data[pos + 1]) < 0x80:
                byte += (high << 7) - 0x80
                pos += 2
            else:
                byte, pos = long_varint(data, pos)
            timestamp = base_timestamp + (byte >> 1 ^ -(byte & 1)) if append_time is None else append_time

            byte = data[pos]
            if byte < 0x80:
                pos += 1
            elif (high := data[pos + 1]) < 0x80:
                byte += (high << 7) - 0x80
                pos += 2
            else:
                byte, pos = long_varint(data, pos)
            delta = byte >> 1 ^ -(byte & 1)
            if not 0 <= delta <= last_delta:
                raise CorruptBatchError(f"a record at offset delta {delta} of {last_delta}")
            offset = base_offset + delta

            byte = data[pos]
            if byte < 0x80:
                pos += 1
            elif (high := data[pos + 1]) < 0x80:
                byte += (high << 7) - 0x80
                pos += 2
            else:
                byte, pos = long_varint(data, pos)
            if byte & 1:
                key = None
            else:
                start = pos
                pos += byte >> 1
                if pos > end:
                    raise CorruptBatchError(f"a key up to {pos} of a record that ends at {end}")
                key = data[start:pos]

            byte = data[pos]
            if byte < 0x80:
                pos += 1
            elif (high := data[pos + 1]) < 0x80:
                byte += (high << 7) - 0x80
                pos += 2
            else:
                byte, pos = long_varint(data, pos)
            if byte & 1:
                value = None
            else:
                start = pos
                pos += byte >> 1
                if pos > end:
                    raise CorruptBatchError(f"a value up to {pos} of a record that ends at {end}")
                value = data[start:pos]

            is_wanted = is_all_wanted or first_offset <= offset <= end_offset
            if data[pos]:
                pos = self._add_headers(data, pos, end, is_wanted and has_headers)
            else:
                pos += 1
            if pos != end:
                raise CorruptBatchError(f"a record ends at {pos} instead of {end}")
            if is_wanted:
                offsets.append(offset)
                timestamps.append(timestamp)
                keys.append(key)
                values.append(value)
                if has_headers:
                    header_ends.append(len(header_keys))
        if pos != size:
            raise CorruptBatchError(f"{size - pos} bytes after {batch.records_count} records")

    def _add_headers(self, data: bytes, pos: int, end: int, is_kept: bool) -> int:
        count, pos = _long_varint(data, pos)
        if count & 1:
            raise CorruptBatchError("a negative count of headers")
        for _ in range(count >> 1):
            key, pos = _read_bytes(data, pos, end)
            value, pos = _read_bytes(data, pos, end)
            if key is None:
                raise CorruptBatchError("a header without a key")
            if is_kept:
                self._header_keys.append(key)
                self._header_values.append(value)
        return pos

    def add_legacy(self, data: Buffer, batch: RecordBatch, first_offset: int, end_offset: int) -> int:
        """Adds a batch of magic 0 or 1 from the buffer that holds it. Returns the bytes of the keys and values that it
        added."""
        payload_bytes = 0
        if batch.magic == 0:
            timestamp_type = NO_TIMESTAMP_TYPE
        else:
            timestamp_type = LOG_APPEND_TIME if batch.is_log_append_time else CREATE_TIME
        for record in list(read_records(data, batch)):
            if first_offset <= record.offset <= end_offset:
                self._offsets.append(record.offset)
                self._timestamps.append(record.timestamp if batch.magic else NO_TIMESTAMP)
                self._timestamp_types.append(timestamp_type)
                self._keys.append(record.key)
                self._values.append(record.value)
                self._header_ends.append(len(self._header_keys))
                payload_bytes += len(record.key or b"") + len(record.value or b"")
        return payload_bytes

    def take(self) -> dict[str, pa.Array]:
        """Returns the wanted columns of all rows since the last call."""
        columns = self._columns
        arrays: dict[str, pa.Array] = {}
        if "key" in columns:
            arrays["key"] = pa.array(self._keys, pa.binary())
        if "value" in columns:
            arrays["value"] = pa.array(self._values, pa.binary())
        if "offset" in columns:
            arrays["offset"] = pa.array(self._offsets, pa.int64())
        if "timestamp" in columns:
            arrays["timestamp"] = _timestamps(self._timestamps)
        if "timestampType" in columns:
            arrays["timestampType"] = pa.array(self._timestamp_types, pa.int32())
        if "headers" in columns:
            keys = [key.decode("utf-8", "replace") for key in self._header_keys]
            arrays["headers"] = header_lists(
                np.array([0, *self._header_ends], np.int32),
                pa.array(keys, pa.string()),
                pa.array(self._header_values, pa.binary()),
            )
        self._clear()
        return arrays


def header_lists(ends: np.ndarray[tuple[int], np.dtype[np.int32]], keys: pa.Array, values: pa.Array) -> pa.Array:
    """Returns a list array with one entry per record; a record without headers is null. `ends` starts with a 0, then
    holds the end of each record's headers."""
    has_none = ends[1:] == ends[:-1]
    return pa.ListArray.from_arrays(
        pa.array(ends),
        pa.StructArray.from_arrays([keys, values], ["key", "value"]),
        type=HEADERS_TYPE,
        mask=pa.array(has_none) if has_none.any() else None,
    )


def _timestamps(timestamps_ms: list[int]) -> pa.Array:
    try:
        ms = np.array(timestamps_ms, np.int64)
    except OverflowError:
        ms = np.array([one & (1 << 64) - 1 for one in timestamps_ms], np.uint64).astype(np.int64)
    us = np.clip(ms, -MAX_TIMESTAMP_MS, MAX_TIMESTAMP_MS) * 1000
    return pa.array(us).view(pa.timestamp("us", tz="UTC"))


def _long_varint(data: bytes, pos: int) -> tuple[int, int]:
    """Reads a varint without the zig-zag decoding. Returns the number and the position after it."""
    value = 0
    for shift, byte in enumerate(islice(data, pos, pos + 10)):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, pos + shift + 1
    raise CorruptBatchError(f"a varint at {pos} of {len(data)} that is unterminated or longer than 64 bits")


def _read_bytes(data: bytes, pos: int, limit: int) -> tuple[bytes | None, int]:
    length, pos = _long_varint(data, pos)
    if length & 1:
        return None, pos
    end = pos + (length >> 1)
    if end > limit:
        raise CorruptBatchError(f"{length >> 1} bytes at {pos} of a record that ends at {limit}")
    return data[pos:end], end
