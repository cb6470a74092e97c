"""The one record of a control batch: what ended a transaction, and in which epoch of its coordinator (semantics 4.1).

Key: version int16, type int16. Value of a marker: version int16, coordinator epoch int32.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.errors import CorruptBatchError
from protocol.primitives import INT16, INT32, Buffer
from protocol.records.record_batch import BATCH_HEADER_BYTES, CODEC_NONE, RecordBatch

ABORT, COMMIT = 0, 1

_KEY_BYTES = 4
_VALUE_BYTES = 6


class EndTransactionMarker(NamedTuple):
    producer_id: int
    offset: int
    aborts: bool
    coordinator_epoch: int


def end_transaction_marker(buf: Buffer, batch: RecordBatch) -> EndTransactionMarker | None:
    """None when the batch was emptied, or its record is of another kind. Control batches are never compressed."""
    if batch.records_count == 0:
        return None
    if batch.codec != CODEC_NONE:
        raise CorruptBatchError(f"control batch at offset {batch.base_offset}: compressed")
    try:
        pos = _after_varint(buf, batch.start + BATCH_HEADER_BYTES) + 1  # record length, attributes
        for _ in range(3):  # timestamp delta, offset delta, key length
            pos = _after_varint(buf, pos)
        if pos + _KEY_BYTES > batch.end:
            raise CorruptBatchError(f"control batch at offset {batch.base_offset}: key cut short")
        kind = INT16.unpack_from(buf, pos + 2)[0]
        if kind not in (ABORT, COMMIT):
            return None
        pos = _after_varint(buf, pos + _KEY_BYTES)  # value length
        if pos + _VALUE_BYTES > batch.end:
            raise CorruptBatchError(f"control batch at offset {batch.base_offset}: value cut short")
    except IndexError as error:
        raise CorruptBatchError(f"control batch at offset {batch.base_offset}: record cut short") from error
    coordinator_epoch: int = INT32.unpack_from(buf, pos + 2)[0]
    return EndTransactionMarker(batch.producer_id, batch.base_offset, kind == ABORT, coordinator_epoch)


def _after_varint(buf: Buffer, pos: int) -> int:
    while buf[pos] & 0x80:
        pos += 1
    return pos + 1
