"""`PythonDecoder`: decodes records into Arrow arrays without numba. It also decodes the rare magic 0 and 1.

The kernel follows the rules of `read_records`. Base timestamp plus delta overflows like Java's long.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from pipeline.decode.record_columns import HEADERS_TYPE, RecordColumns
from protocol.primitives import Buffer
from protocol.records.record_batch import RecordBatch
from protocol.records.record_reader import Record, decompressed_records, read_records

MAX_TIMESTAMP_MS = ((1 << 63) - 1) // 1000
"""The latest timestamp that fits in 64-bit microseconds. Later timestamps are clipped to it."""
NO_TIMESTAMP_TYPE, CREATE_TIME, LOG_APPEND_TIME = -1, 0, 1


class PythonDecoder:
    """Takes batches until `take` returns their rows. If `add` raises `CorruptBatchError`, the batch adds no rows."""

    def __init__(self, columns: RecordColumns) -> None:
        self._columns = columns
        self._records: list[Record] = []
        self._timestamp_types: list[int] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, batch: RecordBatch, records: Buffer, first_offset: int, end_offset: int) -> None:
        """Adds the wanted records of one batch. `records` are the decompressed records of a v2 batch. The offsets are
        inclusive."""
        self._add(batch, decompressed_records(batch, records), first_offset, end_offset)

    def add_legacy(self, data: Buffer, batch: RecordBatch, first_offset: int, end_offset: int) -> int:
        """Adds a batch of magic 0 or 1 from the buffer that holds it. Returns the bytes of the keys and values that it
        added."""
        added = self._add(batch, read_records(data, batch), first_offset, end_offset)
        return sum(len(each.key or b"") + len(each.value or b"") for each in added)

    def _add(self, batch: RecordBatch, records: Iterable[Record], first_offset: int, end_offset: int) -> list[Record]:
        wanted = [each for each in records if first_offset <= each.offset <= end_offset]
        timestamp_type = LOG_APPEND_TIME if batch.is_log_append_time else CREATE_TIME
        self._records += wanted
        self._timestamp_types += [timestamp_type if batch.magic else NO_TIMESTAMP_TYPE] * len(wanted)
        return wanted

    def take(self) -> dict[str, pa.Array]:
        """Returns the wanted columns of all rows since the last call."""
        columns, records, timestamp_types = self._columns, self._records, self._timestamp_types
        self._records, self._timestamp_types = [], []
        arrays: dict[str, pa.Array] = {}
        if "key" in columns:
            arrays["key"] = pa.array([each.key for each in records], pa.binary())
        if "value" in columns:
            arrays["value"] = pa.array([each.value for each in records], pa.binary())
        if "offset" in columns:
            arrays["offset"] = pa.array([each.offset for each in records], pa.int64())
        if "timestamp" in columns:
            arrays["timestamp"] = _timestamps([each.timestamp for each in records])
        if "timestampType" in columns:
            arrays["timestampType"] = pa.array(timestamp_types, pa.int32())
        if "headers" in columns:
            headers = [header for each in records for header in each.headers]
            arrays["headers"] = header_lists(
                np.cumsum([0, *(len(each.headers) for each in records)], dtype=np.int32),
                pa.array([header.key for header in headers], pa.string()),
                pa.array([header.value for header in headers], pa.binary()),
            )
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
