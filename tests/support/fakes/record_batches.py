"""Builds record batches of every magic and codec for tests, without the code under test."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from struct import Struct

import cramjam
import google_crc32c

from protocol.records.record_reader import Header, Record

_V2_AFTER_CRC = Struct(">hiqqqhii")


def record(
    offset: int,
    timestamp: int = 1_600_000_000_000,
    key: bytes | None = None,
    value: bytes | None = b"v",
    headers: Sequence[tuple[str, bytes | None]] = (),
) -> Record:
    return Record(offset, timestamp, key, value, tuple(Header(k, v) for k, v in headers))


def batch_of(
    base_offset: int,
    count: int,
    *,
    value_bytes: int = 10,
    timestamp: int = 1_600_000_000_000,
    leader_epoch: int = 0,
    codec: int = 0,
) -> bytes:
    """Returns a batch of `count` records with consecutive offsets and timestamps (ms)."""
    records = [
        record(base_offset + i, timestamp + i, value=(b"%d-" % (base_offset + i)).ljust(value_bytes, b"x"))
        for i in range(count)
    ]
    return build_batch(base_offset, records, leader_epoch=leader_epoch, codec=codec)


def build_batch(
    base_offset: int,
    records: Sequence[Record],
    *,
    last_offset: int | None = None,
    leader_epoch: int = 0,
    codec: int = 0,
    log_append_time_ms: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    transactional: bool = False,
    control: bool = False,
    xerial: bool = False,
) -> bytes:
    """Returns a v2 batch. Compaction makes batches with a `last_offset` beyond the last record, or without records."""
    base_timestamp = records[0].timestamp if records else -1
    max_timestamp = (
        max((r.timestamp for r in records), default=-1) if log_append_time_ms is None else log_append_time_ms
    )
    if last_offset is None:
        last_offset = records[-1].offset if records else base_offset
    body = compress(codec, b"".join(_encode_record(r, base_offset, base_timestamp) for r in records), xerial)
    attributes = codec | (log_append_time_ms is not None) << 3 | transactional << 4 | control << 5
    after_crc = (
        _V2_AFTER_CRC.pack(
            attributes,
            last_offset - base_offset,
            base_timestamp,
            max_timestamp,
            producer_id,
            producer_epoch,
            -1,
            len(records),
        )
        + body
    )
    crc = google_crc32c.value(after_crc)
    return struct.pack(">qiibI", base_offset, 9 + len(after_crc), leader_epoch, 2, crc) + after_crc


def control_batch(
    offset: int,
    *,
    commit: bool,
    producer_id: int,
    producer_epoch: int = 0,
    leader_epoch: int = 0,
    timestamp: int = 1_600_000_000_000,
) -> bytes:
    """Returns the marker that ends a transaction."""
    key = struct.pack(">hh", 0, 1 if commit else 0)
    marker = record(offset, timestamp, key, struct.pack(">hi", 0, 7))
    return build_batch(
        offset,
        [marker],
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=True,
        control=True,
    )


def legacy_message(
    magic: int, offset: int, timestamp: int, key: bytes | None, value: bytes | None, attributes: int = 0
) -> bytes:
    body = struct.pack(">bb", magic, attributes)
    if magic == 1:
        body += struct.pack(">q", timestamp)
    for field in (key, value):
        body += struct.pack(">i", -1 if field is None else len(field)) + (field or b"")
    return struct.pack(">qiI", offset, 4 + len(body), zlib.crc32(body)) + body


def legacy_wrapper(
    magic: int, base_offset: int, records: Sequence[Record], codec: int, log_append_time_ms: int | None = None
) -> bytes:
    """Returns a compressed message set with the offsets that a broker stores."""
    inner = b"".join(
        legacy_message(magic, r.offset - (base_offset if magic == 1 else 0), r.timestamp, r.key, r.value)
        for r in records
    )
    value = compress(codec, inner, xerial=codec == 2)
    if codec == 3 and magic == 0:
        value = value[:6] + bytes((value[6] ^ 0x55,)) + value[7:]  # the wrong header checksum of KAFKA-3160
    timestamp = max(r.timestamp for r in records) if log_append_time_ms is None else log_append_time_ms
    attributes = codec | (log_append_time_ms is not None) << 3
    return legacy_message(magic, records[-1].offset, timestamp, None, value, attributes)


def compress(codec: int, data: bytes, xerial: bool = False) -> bytes:
    match codec:
        case 0:
            return data
        case 1:
            return bytes(cramjam.gzip.compress(data))
        case 2 if xerial:
            out = bytearray(b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1))
            for start in range(0, len(data), 100):
                block = bytes(cramjam.snappy.compress_raw(data[start : start + 100]))
                out += struct.pack(">i", len(block)) + block
            return bytes(out)
        case 2:
            return bytes(cramjam.snappy.compress_raw(data))
        case 3:
            return _lz4_frame(data)
        case 4:
            return bytes(cramjam.zstd.compress(data))
    raise ValueError(f"codec {codec}")


def _lz4_frame(data: bytes) -> bytes:
    """Returns a frame of independent blocks of at most 64 KiB, as Java's producer writes it."""
    frame = bytearray(bytes.fromhex("04224d18 6040 82"))
    for start in range(0, len(data), 64 << 10):
        block = bytes(cramjam.lz4.compress_block(data[start : start + (64 << 10)], store_size=False))
        frame += struct.pack("<I", len(block)) + block
    return bytes(frame + struct.pack("<I", 0))


def _encode_record(record: Record, base_offset: int, base_timestamp: int) -> bytes:
    body = b"\x00" + _varint(record.timestamp - base_timestamp) + _varint(record.offset - base_offset)
    body += _field(record.key) + _field(record.value) + _varint(len(record.headers))
    for key, value in record.headers:
        body += _field(key.encode()) + _field(value)
    return _varint(len(body)) + body


def _field(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value = value << 1 ^ value >> 63
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
