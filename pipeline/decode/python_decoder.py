"""`PythonDecoder`: records into Arrow arrays without numba, and for what is too rare to be fast: magic 0 and 1.

Varints of one and two bytes are read in place: calls cost more than all else here. The rules, which the kernel shares:

* a varint has at most ten bytes and 64 bits; a record ends where its length says; a batch's records fill it;
* an offset delta lies within the batch's; base timestamp and delta wrap as Java's longs do;
* a length below zero is null, but for a header's key, which is never null; keys that are not UTF-8 are replaced.
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
"""What fits in microseconds; a later one is cut to it."""
NO_TIMESTAMP_TYPE, CREATE_TIME, LOG_APPEND_TIME = -1, 0, 1


class PythonDecoder:
    """Takes batches until `take` gives their rows. A batch that raises `CorruptBatchError` leaves none."""

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
        """`records`: a v2 batch's, decompressed. Offsets inclusive."""
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

            pos += 1  # attributes, which say nothing
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
        """One of magic 0 or 1, in the buffer that holds it; how many bytes of keys and values it added."""
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
        """The rows of all batches since the last call, by column, as far as they are wanted."""
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
    """`ends`: where each record's headers end, after a 0. A record without headers has null."""
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
    """Not yet zig-zag decoded."""
    value = 0
    for shift, byte in enumerate(islice(data, pos, pos + 10)):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, pos + shift + 1
    raise CorruptBatchError(f"a varint at {pos} of {len(data)} that does not end, or not in 64 bits")


def _read_bytes(data: bytes, pos: int, limit: int) -> tuple[bytes | None, int]:
    length, pos = _long_varint(data, pos)
    if length & 1:
        return None, pos
    end = pos + (length >> 1)
    if end > limit:
        raise CorruptBatchError(f"{length >> 1} bytes at {pos} of a record that ends at {limit}")
    return data[pos:end], end
