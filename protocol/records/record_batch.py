"""Record batches as they lie in a log: found, judged, cut and skipped by their headers alone (semantics 4).

Batches are never decompressed, split or changed here. Positions are absolute in the buffer that was given. A batch that
runs past the end is no error: brokers may cut the last one of an answer short. Message sets of magic 0 and 1 are walked
too: magic is byte 16 in every format; their CRC-32 begins at byte 16, a v2 batch's CRC-32C at byte 21.
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
"""Base offset and length: what the length field does not count."""
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

    A legacy entry has `leader_epoch`, `producer_id`, `producer_epoch`, `base_sequence` and `records_count` -1, and
    timestamps -1 in magic 0. A legacy compressed wrapper names only its last offset: `base_offset` equals it.
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
        """Every record's timestamp is `max_timestamp`."""
        return self.attributes & _LOG_APPEND_TIME != 0

    @property
    def is_transactional(self) -> bool:
        return self.magic == 2 and self.attributes & _TRANSACTIONAL != 0

    @property
    def is_control(self) -> bool:
        return self.magic == 2 and self.attributes & _CONTROL != 0


def iterate_batches(buf: Buffer, start: int = 0, end: int | None = None) -> Iterator[RecordBatch]:
    """The whole batches in `[start, end)`; stops at the first that is not complete.

    Raises `CorruptBatchError` for a length or a magic that cannot be. Checks no CRC.
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
        # As `RecordBatch(...)`, which takes three times as long.
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
    """Judges as much of a batch's first bytes as is there."""
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
    """Whether the batch's bytes are the ones that its CRC was made of. Any compatible buffer; nothing is kept."""
    if batch.magic == 2:
        return crc32.iscsi(memoryview(buf)[batch.start + _CRC_COVERS_FROM : batch.end]) == batch.crc
    return zlib.crc32(memoryview(buf)[batch.start + _MAGIC_AT : batch.end]) == batch.crc


def crc32c(buf: Buffer, start: int, end: int, before: int = 0) -> int:
    """CRC-32C of `[start, end)`, after bytes whose CRC is `before`."""
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
    """The whole batches, each CRC-checked, offsets ascending without overlap, leader epochs never falling.

    The first batch must hold `expected_next_offset` or follow it (a gap is the caller's to judge). An incomplete last
    batch is left out: `[-1].end` tells where the good bytes end. Raises `CorruptBatchError`.
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
        if batch.leader_epoch < leader_epoch:
            raise CorruptBatchError(f"batch at {batch.start}: leader epoch {batch.leader_epoch} after {leader_epoch}")
        last_offset = batch.last_offset
        leader_epoch = batch.leader_epoch
        batches.append(batch)
    return batches


def cut_at_batches(buf: Buffer, max_bytes: int, min_one: bool, start: int = 0, end: int | None = None) -> int:
    """The position after the last whole batch that fits `max_bytes` from `start` on; `start` when none does.

    With `min_one` the first batch is taken whatever its size (KIP-74), if it is complete.
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
    """The position of the first whole batch whose last offset is `offset` or higher; if none, where whole batches end.

    That is the batch which holds `offset`, or the first one after it when `offset` lies in a gap.
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
