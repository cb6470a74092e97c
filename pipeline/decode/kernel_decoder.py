"""`KernelDecoder`: makes the same rows as `PythonDecoder` at memory speed. `kernels` writes buffers that Arrow adopts.

Buffers have room for about one Arrow batch, or for one record batch if that is larger. The unused rest of a buffer is
never touched, so it takes address space but no memory.
"""

from __future__ import annotations

from struct import Struct
from types import ModuleType

import numpy as np
import pyarrow as pa

from pipeline.decode.python_decoder import header_lists
from pipeline.decode.record_columns import MAX_ARROW_BYTES, RecordColumns
from protocol.errors import CorruptBatchError
from protocol.primitives import Buffer
from protocol.records.record_batch import RecordBatch

_MIN_ROW_BYTES = 40
_MIN_HEADER_BYTES = 2
_BATCH = Struct("=10q")
_COMPLAINTS = (
    "", "a varint that is unterminated or longer than 64 bits", "a record longer than the rest of the batch",
    "a record at an offset outside the batch", "a field longer than its record", "a malformed header",
    "a record that does not end where its length says", "bytes after the last record",
)  # fmt: skip


class KernelDecoder:
    """Takes batches until `take` returns their rows. If `add` raises `CorruptBatchError`, the batch adds no rows."""

    def __init__(self, columns: RecordColumns, kernels: ModuleType) -> None:
        self._columns = columns
        self._kernels = kernels
        self._decode_records = kernels.decode_records
        self._rows = 0
        self._buffers: dict[int, pa.Buffer] = {}
        self._clear()

    def _clear(self) -> None:
        self._table = np.zeros(self._kernels.TABLE_SIZE, np.int64)
        self._numbers = self._table.data
        self._batch = self._numbers.cast("B")[8 * self._kernels.SOURCE :]
        self._buffers.clear()
        self._rows = 0
        self._free_rows = 0
        self._free_bytes = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, batch: RecordBatch, records: Buffer, first_offset: int, end_offset: int) -> None:
        """Adds the wanted records of one batch.

        `records` are the decompressed records of a v2 batch. Together with the records since the last `take` they have
        at most 2^31 bytes. The offsets are inclusive."""
        count = batch.records_count
        size = len(records)
        if not self._buffers or count > self._free_rows or size > self._free_bytes:
            if self._rows:
                raise ValueError("take() must be called before a batch that exceeds the buffers")
            self._make_buffers(count, size)
        _BATCH.pack_into(
            self._batch,
            0,
            pa.py_buffer(records).address,
            size,
            count,
            batch.base_offset,
            batch.last_offset - batch.base_offset,
            batch.base_timestamp,
            batch.max_timestamp,
            batch.is_log_append_time,
            first_offset,
            end_offset,
        )
        verdict = self._decode_records(self._table)
        if verdict:
            raise CorruptBatchError(_COMPLAINTS[verdict])
        self._rows = self._numbers[self._kernels.ROWS]
        self._free_rows -= count
        self._free_bytes -= size

    def _make_buffers(self, count: int, size: int) -> None:
        kernels, columns = self._kernels, self._columns
        rows = self._free_rows = max(count, MAX_ARROW_BYTES // _MIN_ROW_BYTES)
        room = self._free_bytes = max(size, MAX_ARROW_BYTES)
        self._make(kernels.OFFSETS, 8 * rows)
        self._make(kernels.TIMESTAMPS, 8 * rows)
        self._make(kernels.TIMESTAMP_TYPES, 4 * rows)
        if "key" in columns:
            self._make(kernels.KEY_DATA, room)
            self._make(kernels.KEY_ENDS, 4 * (rows + 1))
            self._make(kernels.KEY_VALIDITY, rows)
        if "value" in columns:
            self._make(kernels.VALUE_DATA, room)
            self._make(kernels.VALUE_ENDS, 4 * (rows + 1))
            self._make(kernels.VALUE_VALIDITY, rows)
        if "headers" in columns:
            headers = room // _MIN_HEADER_BYTES
            self._make(kernels.HEADER_ENDS, 4 * (rows + 1))
            self._make(kernels.HEADER_KEY_DATA, room)
            self._make(kernels.HEADER_KEY_ENDS, 4 * (headers + 1))
            self._make(kernels.HEADER_VALUE_DATA, room)
            self._make(kernels.HEADER_VALUE_ENDS, 4 * (headers + 1))
            self._make(kernels.HEADER_VALUE_VALIDITY, headers)

    def _make(self, number: int, size: int) -> None:
        # Arrow's pool keeps freed memory for the next batch. malloc would return it to the system, and the page faults
        # would cost more than the decoding.
        made = pa.allocate_buffer(size)
        self._buffers[number] = made
        self._table[number] = made.address

    def take(self) -> dict[str, pa.Array]:
        """Returns the wanted columns of all rows since the last call."""
        if not self._rows:
            return {}
        kernels, columns, rows = self._kernels, self._columns, self._rows
        state = self._table.tolist()
        arrays: dict[str, pa.Array] = {}
        if "key" in columns:
            arrays["key"] = self._binary(
                rows, kernels.KEY_ENDS, kernels.KEY_DATA, state[kernels.KEY_BYTES],
                kernels.KEY_VALIDITY, state[kernels.KEY_NULLS],
            )  # fmt: skip
        if "value" in columns:
            arrays["value"] = self._binary(
                rows, kernels.VALUE_ENDS, kernels.VALUE_DATA, state[kernels.VALUE_BYTES],
                kernels.VALUE_VALIDITY, state[kernels.VALUE_NULLS],
            )  # fmt: skip
        if "offset" in columns:
            arrays["offset"] = self._fixed(pa.int64(), rows, kernels.OFFSETS)
        if "timestamp" in columns:
            arrays["timestamp"] = self._fixed(pa.timestamp("us", tz="UTC"), rows, kernels.TIMESTAMPS)
        if "timestampType" in columns:
            arrays["timestampType"] = self._fixed(pa.int32(), rows, kernels.TIMESTAMP_TYPES)
        if "headers" in columns:
            arrays["headers"] = self._headers(rows, state)
        self._clear()
        return arrays

    def _headers(self, rows: int, state: list[int]) -> pa.Array:
        kernels = self._kernels
        count = state[kernels.HEADERS]
        keys = self._binary(count, kernels.HEADER_KEY_ENDS, kernels.HEADER_KEY_DATA, state[kernels.HEADER_KEY_BYTES])
        try:
            keys = keys.cast(pa.string())  # checks every byte for valid UTF-8
        except pa.ArrowInvalid:
            keys = pa.array([key.decode("utf-8", "replace") for key in keys.to_pylist()], pa.string())
        values = self._binary(
            count, kernels.HEADER_VALUE_ENDS, kernels.HEADER_VALUE_DATA, state[kernels.HEADER_VALUE_BYTES],
            kernels.HEADER_VALUE_VALIDITY, state[kernels.HEADER_VALUE_NULLS],
        )  # fmt: skip
        ends = np.frombuffer(self._buffers[kernels.HEADER_ENDS], np.int32, rows + 1)
        return header_lists(ends, keys, values)

    def _fixed(self, arrow_type: pa.DataType, rows: int, number: int) -> pa.Array:
        values = self._buffers[number].slice(0, rows * arrow_type.bit_width // 8)
        return pa.Array.from_buffers(arrow_type, rows, [None, values], 0)

    def _binary(self, count: int, ends: int, data: int, size: int, validity: int = 0, nulls: int = 0) -> pa.Array:
        is_valid: pa.Buffer | None = None
        if nulls:
            flags = np.frombuffer(self._buffers[validity], np.uint8, count)
            is_valid = pa.py_buffer(np.packbits(flags, bitorder="little"))
        entries = self._buffers[ends].slice(0, 4 * (count + 1))
        return pa.Array.from_buffers(pa.binary(), count, [is_valid, entries, self._buffers[data].slice(0, size)], nulls)
