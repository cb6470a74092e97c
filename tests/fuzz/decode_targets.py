"""What must hold for any bytes of a log that become columns: machine code and Python say the same, and so does the
reader of single records where they accept what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa

from pipeline.decode.arrow_records import decode_batches
from pipeline.decode.record_columns import ALL_COLUMNS
from pipeline.decode.wanted_batches import CorruptRecordsError
from protocol.errors import CorruptBatchError
from protocol.records.record_batch import RecordBatch, crc32c, iterate_batches
from protocol.records.record_reader import read_records
from tiers.segment.indexes.segment_index import AbortedTransactionRange

LAST_OFFSET = (1 << 63) - 1
_SEALED, _COMMITTED_ONLY, _RANGE = 1, 2, 4
_FIRST, _END = 11, 15


def decoded_records(data: bytes) -> bool:
    """The first byte: whether checksums are made to hold, what is left out."""
    if not data:
        return False
    flags, log = data[0], sealed(data[1:]) if data[0] & _SEALED else data[1:]
    compiled, corrupt_offset = decode(log, flags, is_compiled=True)
    plain, plain_corrupt_offset = decode(log, flags, is_compiled=False)
    assert corrupt_offset == plain_corrupt_offset
    assert compiled.equals(plain)
    if flags & _COMMITTED_ONLY:
        return compiled.num_rows > 0 and corrupt_offset is None
    first, end = (_FIRST, _END) if flags & _RANGE else (0, LAST_OFFSET)
    rows = iter(compiled.drop_columns(["timestamp"]).to_pylist())
    for batch in _walk(log):
        if batch.base_offset == corrupt_offset or (batch.magic == 2 and batch.base_offset > end):
            break
        if batch.is_control or batch.last_offset < first or batch.records_count == 0:
            continue
        for record in read_records(log, batch):
            if first <= record.offset <= end:
                row = next(rows)
                headers = [(header["key"], header["value"]) for header in row["headers"] or ()]
                assert (row["offset"], row["key"], row["value"], headers) == (
                    record.offset, record.key, record.value, list(record.headers),
                )  # fmt: skip
    assert corrupt_offset is not None or next(rows, None) is None
    return compiled.num_rows > 0 and corrupt_offset is None


def _walk(log: bytes) -> Iterator[RecordBatch]:
    with suppress(CorruptBatchError):
        yield from iterate_batches(log)


def decode(log: bytes, flags: int, is_compiled: bool) -> tuple[pa.Table, int | None]:
    """All rows, and the offset of the batch that is corrupt."""
    found = []
    corrupt_offset = None
    try:
        for batch in decode_batches(
            log,
            topic="orders",
            partition=3,
            first_offset=_FIRST if flags & _RANGE else 0,
            end_offset=_END if flags & _RANGE else LAST_OFFSET,
            columns=ALL_COLUMNS,
            aborted=[AbortedTransactionRange(9, 10, LAST_OFFSET)],
            is_committed_only=bool(flags & _COMMITTED_ONLY),
            is_compiled=is_compiled,
        ):
            batch.validate(full=True)
            found.append(batch)
    except CorruptRecordsError as error:
        corrupt_offset = error.offset
    return pa.Table.from_batches(found, ALL_COLUMNS.schema).combine_chunks(), corrupt_offset


def sealed(log: bytes) -> bytes:
    """With CRCs that hold, so that what lies behind them is reached."""
    out = bytearray(log)
    pos = 0
    while len(out) - pos >= 61:
        end = pos + 12 + int.from_bytes(out[pos + 8 : pos + 12], "big", signed=True)
        if end < pos + 61 or end > len(out):
            break
        if out[pos + 16] == 2:
            out[pos + 17 : pos + 21] = crc32c(out, pos + 21, end).to_bytes(4, "big")
        pos = end
    return bytes(out)
