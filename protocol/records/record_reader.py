"""Reads the records inside a batch, for timestamp look-ups and for readers of records. A Fetch never uses it.

In the proxy, only this module decompresses. Under LogAppendTime every record has the max timestamp of its batch.
Records of control batches count like any other record (docs/semantics.md 5.2). In a compressed wrapper of magic 0 the
inner offsets are absolute. In a wrapper of magic 1 they are relative, and the wrapper has the offset of its last record
(docs/semantics.md 4.2). This module checks no CRCs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol.errors import CorruptBatchError
from protocol.primitives import INT32, Buffer
from protocol.records.compression import decompress
from protocol.records.record_batch import BATCH_HEADER_BYTES, CODEC_NONE, RecordBatch, iterate_batches

_LEGACY_KEY_AT = (18, 26)
"""The position of the key's length in a message of magic 0 and of magic 1."""


class Header(NamedTuple):
    key: str
    value: bytes | None


class Record(NamedTuple):
    offset: int
    timestamp: int
    """-1 in magic 0."""
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]


class TimestampAndOffset(NamedTuple):
    timestamp: int
    offset: int


def read_records(buf: Buffer, batch: RecordBatch) -> Iterator[Record]:
    """Yields the batch's records in offset order.

    Raises `CorruptBatchError` at the first malformed record, after it has yielded the records before that one.
    """
    return _read_legacy(buf, batch) if batch.magic < 2 else decompressed_records(batch, _decompressed(buf, batch))


def decompressed_records(batch: RecordBatch, records: Buffer) -> Iterator[Record]:
    """Yields the records of a batch of magic 2 from its decompressed bytes. Raises as `read_records`.

    * A varint has at most ten bytes and 64 bits. A record ends where its length says. The records fill the batch.
    * An offset delta lies within the batch's deltas.
    * A negative length means null, except for a header's key, which is never null. Keys of headers that are not UTF-8
      are decoded with replacement characters.
    """
    data, end = memoryview(records), 0
    for pos, end, timestamp, offset in _locate_records(batch, data):
        if not batch.base_offset <= offset <= batch.last_offset:
            raise CorruptBatchError(f"a record at offset {offset} of [{batch.base_offset}, {batch.last_offset}]")
        key, pos = _read_bytes(data, pos, end)
        value, pos = _read_bytes(data, pos, end)
        count, pos = _read_varint(data, pos)
        headers = []
        for _ in range(count):
            header_key, pos = _read_bytes(data, pos, end)
            header_value, pos = _read_bytes(data, pos, end)
            if header_key is None:
                raise CorruptBatchError(f"the record at offset {offset} has a header without a key")
            headers.append(Header(header_key.decode("utf-8", "replace"), header_value))
        if pos != end or count < 0:
            raise CorruptBatchError(f"the record at offset {offset} ends at {pos} instead of {end}")
        yield Record(offset, timestamp, key, value, tuple(headers))
    if end != len(data):
        raise CorruptBatchError(f"{len(data) - end} bytes after {batch.records_count} records")


def first_record_at_or_after(
    buf: Buffer, batch: RecordBatch, timestamp: int, min_offset: int = 0
) -> TimestampAndOffset | None:
    """Returns the first record, in offset order, that has at least that timestamp and at least that offset.

    Returns None when the batch has no such record. Raises `CorruptBatchError`.
    """
    if batch.max_timestamp < timestamp or batch.last_offset < min_offset:
        return None
    if batch.magic == 2:
        for _, _, found, offset in _locate_records(batch, _decompressed(buf, batch)):
            if found >= timestamp and offset >= min_offset:
                return TimestampAndOffset(found, offset)
        return None
    for record in _read_legacy(buf, batch):
        if record.timestamp >= timestamp and record.offset >= min_offset:
            return TimestampAndOffset(record.timestamp, record.offset)
    return None


def _decompressed(buf: Buffer, batch: RecordBatch) -> memoryview:
    return memoryview(decompress(batch.codec, memoryview(buf)[batch.start + BATCH_HEADER_BYTES : batch.end]))


def _locate_records(batch: RecordBatch, data: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yields `(position of the key, end, timestamp, offset)` for each record of a batch of magic 2."""
    append_time = batch.max_timestamp if batch.is_log_append_time else None
    base_timestamp = batch.base_timestamp
    base_offset = batch.base_offset
    pos = 0
    for _ in range(batch.records_count):
        length, pos = _read_varint(data, pos)
        end = pos + length
        if length < 0 or end > len(data):
            raise CorruptBatchError(f"a record of {length} bytes at {pos} exceeds its batch of {len(data)} bytes")
        timestamp_delta, pos = _read_varint(data, pos + 1)
        offset_delta, pos = _read_varint(data, pos)
        if pos > end:
            raise CorruptBatchError(f"a record ends at {end}, before its key at {pos}")
        timestamp = base_timestamp + timestamp_delta if append_time is None else append_time
        yield pos, end, timestamp, base_offset + offset_delta
        pos = end


def _read_varint(data: memoryview, pos: int) -> tuple[int, int]:
    """Reads a zig-zag varint of up to ten bytes."""
    try:
        byte = data[pos]
        pos += 1
        if byte < 0x80:
            return byte >> 1 ^ -(byte & 1), pos
        value = byte & 0x7F
        shift = 7
        while byte >= 0x80:
            if shift > 63:
                raise CorruptBatchError(f"the varint that ends after {pos} does not fit 64 bits")
            byte = data[pos]
            pos += 1
            value |= (byte & 0x7F) << shift
            shift += 7
        if value >> 64:
            raise CorruptBatchError(f"the varint that ends at {pos} does not fit 64 bits")
    except IndexError as error:
        raise CorruptBatchError(f"a varint exceeds its batch of {len(data)} bytes") from error
    return value >> 1 ^ -(value & 1), pos


def _read_bytes(data: memoryview, pos: int, limit: int) -> tuple[bytes | None, int]:
    length, pos = _read_varint(data, pos)
    if length < 0:
        return None, pos
    end = pos + length
    if end > limit:
        raise CorruptBatchError(f"a field of {length} bytes at {pos} exceeds its record, which ends at {limit}")
    return bytes(data[pos:end]), end


def _read_legacy(buf: Buffer, batch: RecordBatch) -> Iterator[Record]:
    key, value = _read_legacy_key_and_value(buf, batch)
    if batch.codec == CODEC_NONE:
        yield Record(batch.last_offset, batch.max_timestamp, key, value, ())
        return
    if value is None:
        raise CorruptBatchError(f"the compressed message at offset {batch.last_offset} has no value")
    data = decompress(batch.codec, value)
    inner = list(iterate_batches(data))
    if not inner or any(m.codec != CODEC_NONE or m.magic != batch.magic for m in inner):
        raise CorruptBatchError(f"the compressed message at offset {batch.last_offset} holds no plain message set")
    base_offset = batch.last_offset - inner[-1].last_offset if batch.magic == 1 else 0
    for message in inner:
        key, value = _read_legacy_key_and_value(data, message)
        timestamp = batch.max_timestamp if batch.is_log_append_time else message.max_timestamp
        yield Record(base_offset + message.last_offset, timestamp, key, value, ())


def _read_legacy_key_and_value(buf: Buffer, message: RecordBatch) -> tuple[bytes | None, bytes | None]:
    key, pos = _read_legacy_bytes(buf, message.start + _LEGACY_KEY_AT[message.magic], message.end)
    value, pos = _read_legacy_bytes(buf, pos, message.end)
    if pos != message.end:
        raise CorruptBatchError(f"the message at {message.start} ends at {pos} instead of {message.end}")
    return key, value


def _read_legacy_bytes(buf: Buffer, pos: int, limit: int) -> tuple[bytes | None, int]:
    if pos + INT32.size > limit:
        raise CorruptBatchError(f"a length at {pos} exceeds its message, which ends at {limit}")
    (length,) = INT32.unpack_from(buf, pos)
    pos += INT32.size
    if length < 0:
        return None, pos
    end = pos + length
    if end > limit:
        raise CorruptBatchError(f"a field of {length} bytes at {pos} exceeds its message, which ends at {limit}")
    return bytes(buf[pos:end]), end
