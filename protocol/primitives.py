"""Kafka's primitive types on a buffer: every reader takes `(buf, pos)` and returns `(value, new pos)`.

Readers check bounds before they allocate (semantics 1.2) and raise `TruncatedError`; writers return `bytes`.
"Compact" forms belong to flexible versions: an unsigned varint of length + 1, 0 for null.
"""

from __future__ import annotations

import struct
from uuid import UUID

from protocol.errors import LimitExceededError, ProtocolError, TruncatedError

Buffer = bytes | bytearray | memoryview

MAX_ARRAY_ELEMENTS = 1_000_000
"""What Kafka 4.4 accepts in one array (semantics 1.2)."""
MAX_TAGGED_FIELDS = 10_000
"""What Kafka 4.4 accepts in one tagged section (semantics 1.2)."""

INT8 = struct.Struct(">b")
INT16 = struct.Struct(">h")
INT32 = struct.Struct(">i")
INT64 = struct.Struct(">q")

EMPTY_TAGGED_SECTION = b"\x00"


def read_int8(buf: Buffer, pos: int) -> tuple[int, int]:
    try:
        return INT8.unpack_from(buf, pos)[0], pos + 1
    except struct.error as error:
        raise TruncatedError(f"int8 at {pos} of {len(buf)} bytes") from error


def read_int16(buf: Buffer, pos: int) -> tuple[int, int]:
    try:
        return INT16.unpack_from(buf, pos)[0], pos + 2
    except struct.error as error:
        raise TruncatedError(f"int16 at {pos} of {len(buf)} bytes") from error


def read_int32(buf: Buffer, pos: int) -> tuple[int, int]:
    try:
        return INT32.unpack_from(buf, pos)[0], pos + 4
    except struct.error as error:
        raise TruncatedError(f"int32 at {pos} of {len(buf)} bytes") from error


def read_int64(buf: Buffer, pos: int) -> tuple[int, int]:
    try:
        return INT64.unpack_from(buf, pos)[0], pos + 8
    except struct.error as error:
        raise TruncatedError(f"int64 at {pos} of {len(buf)} bytes") from error


def read_uvarint(buf: Buffer, pos: int) -> tuple[int, int]:
    """An unsigned varint of at most five bytes, low seven bits first."""
    try:
        byte = buf[pos]
        if byte < 0x80:
            return byte, pos + 1
        value = byte & 0x7F
        for shift in (7, 14, 21, 28):
            pos += 1
            byte = buf[pos]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > 0xFFFFFFFF:
                    break
                return value, pos + 1
    except IndexError as error:
        raise TruncatedError(f"uvarint at {pos} of {len(buf)} bytes") from error
    raise ProtocolError(f"uvarint that ends at {pos} does not fit 32 bits")


def read_uuid(buf: Buffer, pos: int) -> tuple[UUID, int]:
    end = pos + 16
    if end > len(buf):
        raise TruncatedError(f"uuid at {pos} of {len(buf)} bytes")
    return UUID(bytes=bytes(buf[pos:end])), end


def read_array_length(buf: Buffer, pos: int, compact: bool) -> tuple[int, int]:
    """The number of elements, -1 for null; checked against the limit and against the bytes that remain."""
    if compact:
        length, pos = read_uvarint(buf, pos)
        length -= 1
    else:
        length, pos = read_int32(buf, pos)
        if length < -1:
            raise ProtocolError(f"array length {length}")
    if length > MAX_ARRAY_ELEMENTS:
        raise LimitExceededError(f"an array of {length} elements; the limit is {MAX_ARRAY_ELEMENTS}")
    if length > len(buf) - pos:
        raise TruncatedError(f"an array of {length} elements in {len(buf) - pos} bytes")
    return length, pos


def read_bytes_bounds(buf: Buffer, pos: int, compact: bool) -> tuple[int, int]:
    """`(start, end)` of a bytes or records field's content; `(start, -1)` for null, where `start` is what follows."""
    if compact:
        length, pos = read_uvarint(buf, pos)
        length -= 1
    else:
        length, pos = read_int32(buf, pos)
    return _bounds(buf, pos, length)


def read_string_bounds(buf: Buffer, pos: int, compact: bool) -> tuple[int, int]:
    """`(start, end)` of a string's UTF-8 content; `(start, -1)` for null, where `start` is what follows."""
    if compact:
        length, pos = read_uvarint(buf, pos)
        length -= 1
    else:
        length, pos = read_int16(buf, pos)
    return _bounds(buf, pos, length)


def _bounds(buf: Buffer, pos: int, length: int) -> tuple[int, int]:
    if length == -1:
        return pos, -1
    if length < -1:
        raise ProtocolError(f"length {length} at {pos}")
    end = pos + length
    if end > len(buf):
        raise TruncatedError(f"{length} bytes at {pos} of {len(buf)}")
    return pos, end


def read_string(buf: Buffer, pos: int, compact: bool) -> tuple[str | None, int]:
    start, end = read_string_bounds(buf, pos, compact)
    if end < 0:
        return None, start
    try:
        return str(buf[start:end], "utf-8"), end
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a string at {start} is not UTF-8") from error


def read_tag_count(buf: Buffer, pos: int) -> tuple[int, int]:
    """How many tagged fields a section holds. Raises `LimitExceededError`."""
    count, pos = read_uvarint(buf, pos)
    if count > MAX_TAGGED_FIELDS:
        raise LimitExceededError(f"a tagged section of {count} fields; the limit is {MAX_TAGGED_FIELDS}")
    return count, pos


def read_tag(buf: Buffer, pos: int) -> tuple[int, int, int, int]:
    """`(tag, where its size is written, where the value starts, where it ends)`."""
    tag, size_at = read_uvarint(buf, pos)
    size, start = read_uvarint(buf, size_at)
    return tag, size_at, start, _bounds(buf, start, size)[1]


def skip_tagged_section(buf: Buffer, pos: int) -> int:
    """The position after a tagged section, unknown tags skipped by their size."""
    if pos < len(buf) and buf[pos] == 0:
        return pos + 1
    count, pos = read_tag_count(buf, pos)
    for _ in range(count):
        pos = read_tag(buf, pos)[3]
    return pos


def write_uvarint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write_string(value: str | None, compact: bool) -> bytes:
    if value is None:
        return b"\x00" if compact else b"\xff\xff"
    raw = value.encode()
    return (write_uvarint(len(raw) + 1) if compact else INT16.pack(len(raw))) + raw


def write_bytes_length(length: int, compact: bool) -> bytes:
    """The prefix of a non-null bytes or records field of `length` bytes."""
    return write_uvarint(length + 1) if compact else INT32.pack(length)


def write_array_length(length: int, compact: bool) -> bytes:
    return write_uvarint(length + 1) if compact else INT32.pack(length)
