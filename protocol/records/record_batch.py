"""Finds, verifies, cuts and skips record batches by their headers alone (docs/semantics.md 4).

This module never decompresses, splits or changes a batch. Positions are absolute in the caller's buffer. A batch that
exceeds the buffer is no error, because a broker may cut the last batch of an answer short. The module also reads
message sets of magic 0 and 1: the magic is byte 16 in every format. The CRC-32 of magic 0 and 1 covers the bytes from
16 on; the CRC-32C of magic 2 covers the bytes from 21 on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from fastcrc import crc32

from protocol.errors import CorruptBatchError
from protocol.primitives import INT32, Buffer

LOG_OVERHEAD_BYTES = 12
"""The size of base offset and length, which the length field does not count."""
BATCH_HEADER_BYTES = 61

CODEC_NONE, CODEC_GZIP, CODEC_SNAPPY, CODEC_LZ4, CODEC_ZSTD = range(5)

NO_TIMESTAMP = -1
NO_PRODUCER_ID = -1
NO_LEADER_EPOCH = -1

_MAGIC_AT = 16
_CODEC_MASK = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_CONTROL = 0x20

_V2_HEADER = Struct(">qiibIhiqqqhii")
_V1_HEADER = Struct(">qiIbbq")
_V0_HEADER = Struct(">qiIbb")
_OFFSET_AND_LENGTH = Struct(">qi")
_MINIMUM_LENGTH = {0: 14, 1: 22, 2: BATCH_HEADER_BYTES - LOG_OVERHEAD_BYTES}
_V2_MINIMUM_LENGTH = _MINIMUM_LENGTH[2]
_LAST_OFFSET_DELTA_AT = 23
_CRC_AT = 17
_CRC_COVERS_FROM = _CRC_AT + 4


class RecordBatch(NamedTuple):
    """One whole batch at `[start, end)` of its buffer.

    For magic 0 and 1, `leader_epoch`, `producer_id`, `producer_epoch`, `base_sequence` and `records_count` are -1; for
    magic 0 the timestamps are -1 as well. A compressed wrapper of magic 0 or 1 names only its last offset, so its
    `base_offset` equals its `last_offset`.
    """

    start: int
    end: int
    base_offset: int
    last_offset: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1

    @property
    def codec(self) -> int:
        return self.attributes & _CODEC_MASK

    @property
    def is_log_append_time(self) -> bool:
        """Whether `max_timestamp` is the timestamp of every record."""
        return self.attributes & _LOG_APPEND_TIME != 0

    @property
    def is_transactional(self) -> bool:
        return self.magic == 2 and self.attributes & _TRANSACTIONAL != 0

    @property
    def is_control(self) -> bool:
        return self.magic == 2 and self.attributes & _CONTROL != 0


def iterate_batches(buf: Buffer, start: int = 0, end: int | None = None) -> Iterator[RecordBatch]:
    """Yields the whole batches in `[start, end)`; stops at the first incomplete batch.

    Raises `CorruptBatchError` for an invalid length or magic. Checks no CRC.
    """
    limit = len(buf) if end is None else end
    unpack_v2 = _V2_HEADER.unpack_from
    pos = start
    while limit - pos > _MAGIC_AT:
        if buf[pos + _MAGIC_AT] != 2:
            legacy = _read_legacy(buf, pos, limit)
            if legacy is None:
                return
            yield legacy
            pos = legacy.end
            continue
        if limit - pos < BATCH_HEADER_BYTES:
            break
        (
            base_offset,
            length,
            leader_epoch,
            magic,
            crc,
            attributes,
            last_offset_delta,
            base_timestamp,
            max_timestamp,
            producer_id,
            producer_epoch,
            base_sequence,
            records_count,
        ) = unpack_v2(buf, pos)
        if length < _V2_MINIMUM_LENGTH or last_offset_delta < 0 or records_count < 0 or base_offset < 0:
            raise CorruptBatchError(
                f"batch at {pos}: base offset {base_offset}, length {length}, "
                f"last offset delta {last_offset_delta}, {records_count} records"
            )
        batch_end = pos + LOG_OVERHEAD_BYTES + length
        if batch_end > limit:
            return
        # `RecordBatch(...)` does the same, but takes three times as long.
        yield tuple.__new__(
            RecordBatch,
            (
                pos,
                batch_end,
                base_offset,
                base_offset + last_offset_delta,
                leader_epoch,
                magic,
                crc,
                attributes,
                base_timestamp,
                max_timestamp,
                producer_id,
                producer_epoch,
                base_sequence,
                records_count,
            ),
        )
        pos = batch_end
    _check_tail(buf, pos, limit)


def _read_legacy(buf: Buffer, pos: int, limit: int) -> RecordBatch | None:
    _check_tail(buf, pos, limit)
    magic = buf[pos + _MAGIC_AT]
    end = pos + LOG_OVERHEAD_BYTES + INT32.unpack_from(buf, pos + 8)[0]
    if end > limit:
        return None
    timestamp = NO_TIMESTAMP
    if magic == 0:
        offset, _, crc, _, attributes = _V0_HEADER.unpack_from(buf, pos)
    else:
        offset, _, crc, _, attributes, timestamp = _V1_HEADER.unpack_from(buf, pos)
    return RecordBatch(
        pos,
        end,
        offset,
        offset,
        NO_LEADER_EPOCH,
        magic,
        crc,
        attributes,
        timestamp,
        timestamp,
        NO_PRODUCER_ID,
        -1,
        -1,
        -1,
    )


def _check_tail(buf: Buffer, pos: int, limit: int) -> None:
    """Checks the first bytes of a batch as far as they are present. Raises `CorruptBatchError`."""
    if limit - pos < LOG_OVERHEAD_BYTES:
        return
    length = INT32.unpack_from(buf, pos + 8)[0]
    minimum = _MINIMUM_LENGTH[0]
    if limit - pos > _MAGIC_AT:
        magic = buf[pos + _MAGIC_AT]
        if magic not in _MINIMUM_LENGTH:
            raise CorruptBatchError(f"batch at {pos}: magic {magic}")
        minimum = _MINIMUM_LENGTH[magic]
    if length < minimum:
        raise CorruptBatchError(f"batch at {pos}: length {length} is below {minimum}")


def crc_matches(buf: Buffer, batch: RecordBatch) -> bool:
    """Returns whether the batch's CRC matches its bytes. Keeps no reference to `buf`."""
    if batch.magic == 2:
        return crc32.iscsi(memoryview(buf)[batch.start + _CRC_COVERS_FROM : batch.end]) == batch.crc
    return zlib.crc32(memoryview(buf)[batch.start + _MAGIC_AT : batch.end]) == batch.crc


def crc32c(buf: Buffer, start: int, end: int, before: int = 0) -> int:
    """Returns the CRC-32C of `[start, end)`, continued from preceding bytes whose CRC is `before`."""
    return crc32.iscsi(memoryview(buf)[start:end], before)


def verify_crc(buf: Buffer, batch: RecordBatch) -> None:
    """Raises `CorruptBatchError` when the CRC does not match."""
    if not crc_matches(buf, batch):
        raise CorruptBatchError(
            f"batch at {batch.start}: CRC mismatch, offsets {batch.base_offset} to {batch.last_offset}"
        )


def verify_batches(
    buf: Buffer, expected_next_offset: int | None = None, start: int = 0, end: int | None = None
) -> list[RecordBatch]:
    """Returns the whole batches in `[start, end)` after verifying their CRCs, offsets and leader epochs.

    The offsets must ascend without overlap, and the leader epochs must not decrease. A batch of magic 0 or 1 has no
    leader epoch. It may follow one of magic 2, after the topic's message format was set back. The first batch must hold
    `expected_next_offset` or follow it; the caller decides whether a gap before it is acceptable. The result omits an
    incomplete last batch, so `[-1].end` is the end of the verified bytes. Raises `CorruptBatchError`.
    """
    batches: list[RecordBatch] = []
    last_offset = -1 if expected_next_offset is None else expected_next_offset - 1
    leader_epoch = NO_LEADER_EPOCH
    view = memoryview(buf)
    for batch in iterate_batches(buf, start, end):
        if not crc_matches(view, batch):
            verify_crc(view, batch)
        lowest_offset = batch.base_offset if batches else batch.last_offset
        if lowest_offset <= last_offset:
            raise CorruptBatchError(f"batch at {batch.start}: offset {lowest_offset} after {last_offset}")
        if NO_LEADER_EPOCH < batch.leader_epoch < leader_epoch:
            raise CorruptBatchError(f"batch at {batch.start}: leader epoch {batch.leader_epoch} after {leader_epoch}")
        last_offset = batch.last_offset
        leader_epoch = max(leader_epoch, batch.leader_epoch)
        batches.append(batch)
    return batches


def cut_at_batches(buf: Buffer, max_bytes: int, min_one: bool, start: int = 0, end: int | None = None) -> int:
    """Returns the end of the last whole batch within `max_bytes` from `start`; `start` when no batch fits.

    With `min_one`, the first batch counts whatever its size (KIP-74), provided it is complete.
    """
    limit = len(buf) if end is None else end
    budget_end = min(limit, start + max_bytes)
    unpack = _OFFSET_AND_LENGTH.unpack_from
    pos = start
    while limit - pos >= LOG_OVERHEAD_BYTES:
        length = unpack(buf, pos)[1]
        if length < _MINIMUM_LENGTH[0]:
            raise CorruptBatchError(f"batch at {pos}: length {length}")
        batch_end = pos + LOG_OVERHEAD_BYTES + length
        if batch_end > budget_end and not (min_one and pos == start and batch_end <= limit):
            break
        pos = batch_end
    return pos


def skip_to_offset(buf: Buffer, offset: int, start: int = 0, end: int | None = None) -> int:
    """Returns the position of the first whole batch whose last offset is `offset` or higher.

    This is the batch that holds `offset`, or the first batch after it when `offset` lies in a gap. When there is no
    such batch, returns the end of the last whole batch.
    """
    limit = len(buf) if end is None else end
    unpack = _OFFSET_AND_LENGTH.unpack_from
    pos = start
    while limit - pos > _MAGIC_AT:
        last_offset, length = unpack(buf, pos)
        magic = buf[pos + _MAGIC_AT]
        if length < _MINIMUM_LENGTH.get(magic, 1 << 31):
            raise CorruptBatchError(f"batch at {pos}: magic {magic}, length {length}")
        batch_end = pos + LOG_OVERHEAD_BYTES + length
        if batch_end > limit:
            break
        if magic == 2:
            last_offset += INT32.unpack_from(buf, pos + _LAST_OFFSET_DELTA_AT)[0]
        if last_offset >= offset:
            break
        pos = batch_end
    return pos
