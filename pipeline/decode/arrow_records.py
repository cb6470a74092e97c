"""`decode_batches`: turns whole record batches into Arrow batches. Both tiers use it for every read of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import pyarrow as pa

from pipeline.decode.kernel_cache import load_kernels
from pipeline.decode.kernel_decoder import KernelDecoder
from pipeline.decode.python_decoder import PythonDecoder
from pipeline.decode.record_columns import KAFKA_COLUMNS, MAX_ARROW_BYTES, RecordColumns
from pipeline.decode.wanted_batches import MAX_OFFSET, AbortedTransactions, CorruptRecordsError, wanted_batches
from protocol.errors import CorruptBatchError
from protocol.primitives import Buffer
from protocol.records.compression import Decompressor
from protocol.records.record_batch import BATCH_HEADER_BYTES, RecordBatch
from tiers.segment.indexes.segment_index import AbortedTransactionRange

_EMPTY_BATCH = RecordBatch(0, 61, 0, 0, -1, 2, 0, 0, -1, -1, -1, -1, -1, 0)
_MIN_RECORD_BYTES = 7
_FIXED_ROW_BYTES = 40
"""Approximate size of a row without its topic name: offset, timestamp, timestamp type, partition, and the end positions
of key, value, topic and headers."""


def decode_batches(
    data: Buffer,
    *,
    topic: str,
    partition: int,
    first_offset: int,
    end_offset: int,
    columns: RecordColumns = KAFKA_COLUMNS,
    aborted: Sequence[AbortedTransactionRange] = (),
    is_committed_only: bool,
    min_timestamp_ms: int | None = None,
    is_compiled: bool = True,
    checked: Iterable[RecordBatch] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields the records of the batches in `data` with offsets from `first_offset` to `end_offset`, both inclusive.

    The caller must not change `data` before the last Arrow batch; no Arrow batch refers to it. Control records are
    never yielded. With `is_committed_only`, records of `aborted` transactions are not yielded either. Batches whose
    latest record is before `min_timestamp_ms` are skipped without decompression; other batches may still hold earlier
    records.

    If `is_compiled` is false or numba is missing, a slower decoder with the same results runs.

    `checked` holds the batches up to the end of `data`, if the caller has already compared them with their CRCs.
    Otherwise this function does that.

    An aborted range without an end extends to the ABORT marker. The caller must not pass it again with bytes after that
    marker.

    Raises `CorruptRecordsError` (a `CorruptBatchError`) at a batch that cannot be read, after it has yielded all
    records before that batch.
    """
    end_offset = min(end_offset, MAX_OFFSET)
    transactions = AbortedTransactions(aborted) if is_committed_only else None
    rows = _Rows(columns, topic, partition, is_compiled)
    view = memoryview(data)
    corrupt: CorruptRecordsError | None = None
    try:
        for batch in wanted_batches(view, first_offset, end_offset, transactions, min_timestamp_ms, checked):
            try:
                rows.add(view, batch, first_offset, end_offset)
            except CorruptBatchError as error:
                raise CorruptRecordsError(batch.base_offset, str(error)) from error
            while rows.finished:
                yield rows.finished.pop(0)
    except CorruptRecordsError as error:
        corrupt = error
    rows.finish()
    yield from rows.finished
    if corrupt is not None:
        raise corrupt


class _Rows:
    """Collects rows and turns them into one Arrow batch after another."""

    def __init__(self, columns: RecordColumns, topic: str, partition: int, is_compiled: bool) -> None:
        self._columns = columns
        self._topic = topic
        self._partition = partition
        self._row_bytes = _FIXED_ROW_BYTES + len(topic.encode())
        self._python_decoder = PythonDecoder(columns)
        kernels = load_kernels() if is_compiled else None
        self._fast_decoder = self._python_decoder if kernels is None else KernelDecoder(columns, kernels)
        self._decoder: PythonDecoder | KernelDecoder = self._fast_decoder
        self._size_bytes = 0
        self._decompressor = Decompressor()
        self.finished: list[pa.RecordBatch] = []

    def add(self, data: memoryview, batch: RecordBatch, first_offset: int, end_offset: int) -> None:
        """Adds the wanted records of a batch. If it raises `CorruptBatchError`, no row of the batch is added."""
        if batch.magic < 2:
            self._use(self._python_decoder)
            rows_before = len(self._python_decoder)
            payload_bytes = self._python_decoder.add_legacy(data, batch, first_offset, end_offset)
            self._size_bytes += payload_bytes + (len(self._python_decoder) - rows_before) * self._row_bytes
            if self._size_bytes > MAX_ARROW_BYTES:
                self.finish()
            return
        if batch.size_bytes == BATCH_HEADER_BYTES and batch.records_count == 0:  # compaction leaves empty batches
            return
        # `records` is valid until the next call. The decoder copies what it needs of it before that.
        records = self._decompressor.decompress(batch.codec, data[batch.start + BATCH_HEADER_BYTES : batch.end])
        if batch.records_count * _MIN_RECORD_BYTES > len(records):
            raise CorruptBatchError(f"{batch.records_count} records in {len(records)} bytes")
        size_bytes = len(records) + batch.records_count * self._row_bytes
        if self._size_bytes + size_bytes > MAX_ARROW_BYTES:
            self.finish()
        self._use(self._fast_decoder)
        self._decoder.add(batch, records, first_offset, end_offset)
        self._size_bytes += size_bytes

    def _use(self, decoder: PythonDecoder | KernelDecoder) -> None:
        if decoder is not self._decoder:
            self.finish()
            self._decoder = decoder

    def finish(self) -> None:
        """Closes the current Arrow batch. Later rows go to the next one."""
        rows, size_bytes = len(self._decoder), self._size_bytes
        self._size_bytes = 0
        arrays = self._decoder.take()
        if rows == 0:
            return
        arrays["topic"] = _repeated(self._topic, pa.string(), rows)
        arrays["partition"] = _repeated(self._partition, pa.int32(), rows)
        names = self._columns.names
        batch = pa.RecordBatch.from_arrays([arrays[name] for name in names], names)
        # Headers may take more memory than in the record. Arrow counts bytes slowly, so it counts only with headers.
        is_small = size_bytes <= MAX_ARROW_BYTES and "headers" not in self._columns
        self.finished += [batch] if is_small else _in_pieces(batch)


def _in_pieces(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Splits a batch into pieces of at most `MAX_ARROW_BYTES` or of one record."""
    if batch.nbytes <= MAX_ARROW_BYTES or batch.num_rows == 1:
        return [batch]
    middle = batch.num_rows // 2
    return [*_in_pieces(batch.slice(0, middle)), *_in_pieces(batch.slice(middle))]


def _repeated(value: object, arrow_type: pa.DataType, rows: int) -> pa.Array:
    return _many(value, arrow_type, 1 << (rows - 1).bit_length()).slice(0, rows)


@lru_cache(maxsize=32)
def _many(value: object, arrow_type: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, arrow_type), rows)


def warm() -> bool:
    """Compiles the kernels and keeps the code, so that no task waits for it. Returns False if numba is missing."""
    kernels = load_kernels()
    if kernels is not None:
        KernelDecoder(KAFKA_COLUMNS, kernels).add(_EMPTY_BATCH, b"", 0, 0)
    return kernels is not None
