"""Readers and writers of Kafka's primitive types: a reader takes `(buf, pos)` and returns `(value, new pos)`.

Readers check bounds before they allocate (docs/semantics.md 1.2) and raise `TruncatedError`. Writers return `bytes`.
Flexible versions use the "compact" forms, whose length is an unsigned varint of length + 1; 0 means null.
"""

from __future__ import annotations

import struct
from typing import Final
from uuid import UUID

from protocol.errors import LimitExceededError, ProtocolError, TruncatedError
from protocol.steps import Steps

Buffer = bytes | bytearray | memoryview

MAX_ARRAY_ELEMENTS = 1_000_000
"""The most elements that Kafka 4.4 accepts in one array (docs/semantics.md 1.2)."""
MAX_TAGGED_FIELDS = 10_000
"""The most fields that Kafka 4.4 accepts in one tagged section (docs/semantics.md 1.2)."""
MAX_ITEMS: Final = 50_000
"""The most items of a request that is decoded, so that one request takes a short time, whatever its bytes are.

An item is an element of an array that the decoder visits: a topic, a partition, a resource, a setting or a group.

`kafka-topics.sh --describe` asks for the settings of all topics in one request. MirrorMaker changes every setting of
every topic in one request, which is about 35 items for a topic."""

INT8 = struct.Struct(">b")
INT16 = struct.Struct(">h")
INT32 = struct.Struct(">i")
INT64 = struct.Struct(">q")

EMPTY_TAGGED_SECTION = b"\x00"


def read_int8(buf: Buffer, pos: int) -> tuple[int, int]:
    try:
        return INT8.unpack_from(buf, pos)[0], pos + 1
    except struct.error as error:
        raise TruncatedError(f"an int8 at {pos} exceeds the message of {len(buf)} bytes", pos) from error


def read_int16(buf: Buffer, pos: int) -> tuple[int, int]:
    try:
        return INT16.unpack_from(buf, pos)[0], pos + 2
    except struct.error as error:
        raise TruncatedError(f"an int16 at {pos} exceeds the message of {len(buf)} bytes", pos) from error


def read_int32(buf: Buffer, pos: int) -> tuple[int, int]:
    try:
        return INT32.unpack_from(buf, pos)[0], pos + 4
    except struct.error as error:
        raise TruncatedError(f"an int32 at {pos} exceeds the message of {len(buf)} bytes", pos) from error


def read_int64(buf: Buffer, pos: int) -> tuple[int, int]:
    try:
        return INT64.unpack_from(buf, pos)[0], pos + 8
    except struct.error as error:
        raise TruncatedError(f"an int64 at {pos} exceeds the message of {len(buf)} bytes", pos) from error


def read_uvarint(buf: Buffer, pos: int) -> tuple[int, int]:
    """Reads an unsigned varint of at most five bytes, low seven bits first."""
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
        raise TruncatedError(f"a uvarint at {pos} exceeds the message of {len(buf)} bytes", pos) from error
    raise ProtocolError(f"the uvarint that ends at {pos} does not fit 32 bits", pos)


def read_uuid(buf: Buffer, pos: int) -> tuple[UUID, int]:
    end = pos + 16
    if end > len(buf):
        raise TruncatedError(f"a uuid at {pos} exceeds the message of {len(buf)} bytes", pos)
    return UUID(bytes=bytes(buf[pos:end])), end


def read_array_length(buf: Buffer, pos: int, compact: bool) -> tuple[int, int]:
    """Reads the number of elements; -1 means null.

    Raises `LimitExceededError` when the number exceeds the limit, and `TruncatedError` when it exceeds the number of
    bytes that remain.
    """
    if compact:
        length, pos = read_uvarint(buf, pos)
        length -= 1
    else:
        length, pos = read_int32(buf, pos)
        if length < -1:
            raise ProtocolError(f"the array length {length} is invalid", pos)
    if length > MAX_ARRAY_ELEMENTS:
        raise LimitExceededError(f"an array of {length} elements exceeds the limit of {MAX_ARRAY_ELEMENTS}", pos)
    if length > len(buf) - pos:
        raise TruncatedError(f"an array announces {length} elements, but only {len(buf) - pos} bytes remain", pos)
    return length, pos


def read_bytes_bounds(buf: Buffer, pos: int, compact: bool) -> tuple[int, int]:
    """Returns `(start, end)` of the content of a bytes or records field.

    For null it returns `(start, -1)`, where `start` is the position after the field.
    """
    if compact:
        length, pos = read_uvarint(buf, pos)
        length -= 1
    else:
        length, pos = read_int32(buf, pos)
    return _bounds(buf, pos, length)


def read_string_bounds(buf: Buffer, pos: int, compact: bool) -> tuple[int, int]:
    """Returns `(start, end)` of a string's UTF-8 content.

    For null it returns `(start, -1)`, where `start` is the position after the field.
    """
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
        raise ProtocolError(f"the length {length} before {pos} is invalid", pos)
    end = pos + length
    if end > len(buf):
        raise TruncatedError(f"a field of {length} bytes at {pos} exceeds the message of {len(buf)} bytes", pos)
    return pos, end


def read_string(buf: Buffer, pos: int, compact: bool) -> tuple[str | None, int]:
    start, end = read_string_bounds(buf, pos, compact)
    if end < 0:
        return None, start
    try:
        return str(buf[start:end], "utf-8"), end
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the string at {start} is not UTF-8", start) from error


def read_tag_count(buf: Buffer, pos: int) -> tuple[int, int]:
    """Reads the number of fields in a tagged section. Raises `LimitExceededError`."""
    count, pos = read_uvarint(buf, pos)
    if count > MAX_TAGGED_FIELDS:
        raise LimitExceededError(f"a tagged section of {count} fields exceeds the limit of {MAX_TAGGED_FIELDS}", pos)
    return count, pos


def read_tag(buf: Buffer, pos: int) -> tuple[int, int, int, int]:
    """Returns `(tag, position of its size, start of its value, end of its value)`."""
    tag, size_at = read_uvarint(buf, pos)
    size, start = read_uvarint(buf, size_at)
    return tag, size_at, start, _bounds(buf, start, size)[1]


def skip_tagged_section(buf: Buffer, pos: int) -> int:
    """Returns the position after a tagged section. Skips every tagged field by its size."""
    if pos < len(buf) and buf[pos] == 0:
        return pos + 1
    count, pos = read_tag_count(buf, pos)
    for _ in range(count):
        pos = read_tag(buf, pos)[3]
    return pos


def skip_tags(buf: Buffer, pos: int) -> Steps[int]:
    """Does as `skip_tagged_section`, in steps: a section may have thousands of fields."""
    if pos < len(buf) and buf[pos] == 0:
        return pos + 1
    count, pos = read_tag_count(buf, pos)
    for _ in range(count):
        pos = read_tag(buf, pos)[3]
        yield
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
    """Returns the length prefix of a non-null bytes or records field of `length` bytes."""
    return write_uvarint(length + 1) if compact else INT32.pack(length)


def write_array_length(length: int, compact: bool) -> bytes:
    return write_uvarint(length + 1) if compact else INT32.pack(length)


def check_items(count: int, limit: int = MAX_ITEMS) -> None:
    if count > limit:
        raise LimitExceededError(f"a request with {count} items or more, above the limit of {limit}")
