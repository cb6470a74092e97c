"""Reads the marker that ends a transaction: the one record of a control batch (docs/semantics.md 4.1).

The key is version int16, type int16. The value of a marker is version int16, coordinator epoch int32.
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
    """Returns the marker in a control batch; None when compaction emptied the batch or the record is no such marker.

    Raises `CorruptBatchError` for a malformed record and for a compressed batch: control batches are never compressed.
    """
    if batch.records_count == 0:
        return None
    if batch.codec != CODEC_NONE:
        raise CorruptBatchError(f"the control batch at offset {batch.base_offset} is compressed")
    try:
        pos = _after_varint(buf, batch.start + BATCH_HEADER_BYTES) + 1  # record length, attributes
        for _ in range(3):  # timestamp delta, offset delta, key length
            pos = _after_varint(buf, pos)
        if pos + _KEY_BYTES > batch.end:
            raise CorruptBatchError(f"the control batch at offset {batch.base_offset} has a truncated key")
        kind = INT16.unpack_from(buf, pos + 2)[0]
        if kind not in (ABORT, COMMIT):
            return None
        pos = _after_varint(buf, pos + _KEY_BYTES)  # value length
        if pos + _VALUE_BYTES > batch.end:
            raise CorruptBatchError(f"the control batch at offset {batch.base_offset} has a truncated value")
    except IndexError as error:
        raise CorruptBatchError(f"the control batch at offset {batch.base_offset} has a truncated record") from error
    coordinator_epoch: int = INT32.unpack_from(buf, pos + 2)[0]
    return EndTransactionMarker(batch.producer_id, batch.base_offset, kind == ABORT, coordinator_epoch)


def _after_varint(buf: Buffer, pos: int) -> int:
    while buf[pos] & 0x80:
        pos += 1
    return pos + 1
