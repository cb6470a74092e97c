"""The records of the drill. A record has its identity and a checksum."""

from __future__ import annotations

import random
import struct
import zlib
from typing import NamedTuple

_HEADER = struct.Struct(">IIQ")
_CHECKSUM = struct.Struct(">I")
MIN_BYTES = _HEADER.size + _CHECKSUM.size


class DrillRecord(NamedTuple):
    topic: int
    """A checksum of the topic name."""
    partition: int
    sequence: int


class DamagedRecordError(Exception):
    """A value differs from the written one."""


def topic_number(topic: str) -> int:
    return zlib.crc32(topic.encode())


def encode(record: DrillRecord, size: int) -> bytes:
    """Returns a value of `size` bytes or a little more. It depends only on the record, and does not compress."""
    filling = random.Random(record.sequence).randbytes(max(0, size - MIN_BYTES))
    body = _HEADER.pack(*record) + filling
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode(value: bytes) -> DrillRecord:
    """Raises `DamagedRecordError`."""
    if len(value) < MIN_BYTES:
        raise DamagedRecordError(f"a value of {len(value)} bytes is not a record of the drill")
    (checksum,) = _CHECKSUM.unpack_from(value, len(value) - _CHECKSUM.size)
    if zlib.crc32(memoryview(value)[: -_CHECKSUM.size]) != checksum:
        raise DamagedRecordError("the checksum is wrong")
    return DrillRecord(*_HEADER.unpack_from(value))
