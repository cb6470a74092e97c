"""`decode_records`: writes the records of one batch directly into Arrow's buffers, compiled by numba.

The rules are exactly those of `PythonDecoder`. The kernel accesses memory by address: passing numba's arrays takes
longer than reading a small batch, and copying their slices takes longer than memcpy. Only these rules protect memory:

* Reading: every varint is read below the end of the batch, and every length is compared with the rest of its record.
* Writing: each byte is copied at most once, so an output with room for the whole batch has room for all copies. The
  same holds for rows, with room for all records, and for headers, which take at least two bytes each.
* The kernel writes only to the addresses in the caller's `table`, and updates the table's state only if the whole batch
  is valid.

`kernel_cache` may copy this file and import it from elsewhere, so it imports no module of ours.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # it has no types
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

(
    KEY_DATA, KEY_ENDS, KEY_VALIDITY, VALUE_DATA, VALUE_ENDS, VALUE_VALIDITY, OFFSETS, TIMESTAMPS,
    TIMESTAMP_TYPES, HEADER_ENDS, HEADER_KEY_DATA, HEADER_KEY_ENDS, HEADER_VALUE_DATA, HEADER_VALUE_ENDS,
    HEADER_VALUE_VALIDITY,
) = range(15)  # fmt: skip
"""Addresses in the table. 0 for `KEY_DATA`, `VALUE_DATA` or `HEADER_ENDS` means that the column is not wanted."""
(
    ROWS, KEY_BYTES, VALUE_BYTES, KEY_NULLS, VALUE_NULLS,
    HEADERS, HEADER_KEY_BYTES, HEADER_VALUE_BYTES, HEADER_VALUE_NULLS,
) = range(15, 24)  # fmt: skip
"""State in the table. Arrays of ends start with a 0. Validity has one byte per entry; 1 means not null."""
(
    SOURCE, SIZE, COUNT, BASE_OFFSET, LAST_DELTA, BASE_TIMESTAMP, APPEND_TIMESTAMP, IS_APPEND_TIME,
    FIRST_OFFSET, END_OFFSET,
) = range(24, 34)  # fmt: skip
"""The batch, also in the table, because numba takes longer per argument than per ten packed numbers. `SOURCE` is the
address of `SIZE` bytes. The offsets are inclusive."""
TABLE_SIZE = 34

GOOD, BAD_VARINT, BAD_LENGTH, BAD_OFFSET, BAD_FIELD, BAD_HEADERS, BAD_END, BAD_COUNT = range(8)

_MAX_INT64 = (1 << 63) - 1
_MAX_TIMESTAMP_MS = ((1 << 63) - 1) // 1000


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _make_store(bits: int) -> Any:
    @intrinsic
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, value = arguments
            number = builder.trunc(value, ir.IntType(bits)) if bits < 64 else value
            builder.store(number, _pointer(builder, address, bits), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return store


def _make_load_byte() -> Any:
    @intrinsic
    def load_byte(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            byte = builder.load(_pointer(builder, arguments[0], 8))
            return builder.zext(byte, ir.IntType(64))

        return types.int64(types.int64), generate

    return load_byte


def _make_copy() -> Any:
    @intrinsic
    def copy(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, source, count = arguments
            target, source = _pointer(builder, target, 8), _pointer(builder, source, 8)
            cgutils.raw_memcpy(builder, target, source, count, 1)  # type: ignore[no-untyped-call]  # numba's
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return copy


_store_int8, _store_int32, _store_int64 = _make_store(8), _make_store(32), _make_store(64)
_load_byte, _copy = _make_load_byte(), _make_copy()


@njit(inline="never", nogil=True)
def _long_varint(pos: int, end: int) -> tuple[int, int]:
    value = 0
    shift = 0
    while pos < end:
        byte = _load_byte(pos)
        pos += 1
        if shift == 63 and byte > 1:
            break
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1 & _MAX_INT64) ^ -(value & 1), pos
        shift += 7
    return 0, 0


@njit(nogil=True)
def _varint(pos: int, end: int) -> tuple[int, int]:
    """Returns the number and the position after it; the position is 0 if the varint is malformed."""
    if pos < end:
        byte = _load_byte(pos)
        if byte < 0x80:
            return byte >> 1 ^ -(byte & 1), pos + 1
        if pos + 1 < end:
            high = _load_byte(pos + 1)
            if high < 0x80:
                byte += (high << 7) - 0x80
                return byte >> 1 ^ -(byte & 1), pos + 2
    return _long_varint(pos, end)


@njit(cache=True, nogil=True)
def decode_records(table: Any) -> int:
    """Returns `GOOD`, or the code of the first defect in the batch."""
    count, base_offset, last_delta = table[COUNT], table[BASE_OFFSET], table[LAST_DELTA]
    base_timestamp, append_timestamp = table[BASE_TIMESTAMP], table[APPEND_TIMESTAMP]
    is_append_time = table[IS_APPEND_TIME]
    first_offset, end_offset = table[FIRST_OFFSET], table[END_OFFSET]
    key_data, key_ends, key_validity = table[KEY_DATA], table[KEY_ENDS], table[KEY_VALIDITY]
    value_data, value_ends, value_validity = table[VALUE_DATA], table[VALUE_ENDS], table[VALUE_VALIDITY]
    offsets, timestamps, timestamp_types = table[OFFSETS], table[TIMESTAMPS], table[TIMESTAMP_TYPES]
    header_ends = table[HEADER_ENDS]
    header_key_data, header_key_ends = table[HEADER_KEY_DATA], table[HEADER_KEY_ENDS]
    header_value_data, header_value_ends = table[HEADER_VALUE_DATA], table[HEADER_VALUE_ENDS]
    header_value_validity = table[HEADER_VALUE_VALIDITY]
    rows, key_bytes, value_bytes = table[ROWS], table[KEY_BYTES], table[VALUE_BYTES]
    key_nulls, value_nulls = table[KEY_NULLS], table[VALUE_NULLS]
    headers, header_value_nulls = table[HEADERS], table[HEADER_VALUE_NULLS]
    header_key_bytes, header_value_bytes = table[HEADER_KEY_BYTES], table[HEADER_VALUE_BYTES]

    if key_data != 0:
        _store_int32(key_ends, 0)
    if value_data != 0:
        _store_int32(value_ends, 0)
    if header_ends != 0:
        _store_int32(header_ends, 0)
        _store_int32(header_key_ends, 0)
        _store_int32(header_value_ends, 0)
    pos = table[SOURCE]
    limit = pos + table[SIZE]
    for _ in range(count):
        length, pos = _varint(pos, limit)
        if pos == 0:
            return BAD_VARINT
        if length < 0 or length > limit - pos:
            return BAD_LENGTH
        end = pos + length
        timestamp, pos = _varint(pos + 1, limit)  # skips the attributes, which have no meaning
        if pos == 0:
            return BAD_VARINT
        delta, pos = _varint(pos, limit)
        if pos == 0:
            return BAD_VARINT
        if delta < 0 or delta > last_delta:
            return BAD_OFFSET
        offset = base_offset + delta
        is_wanted = first_offset <= offset <= end_offset

        key_length, pos = _varint(pos, limit)
        if pos == 0:
            return BAD_VARINT
        key = pos
        if key_length >= 0:
            if key_length > end - pos:
                return BAD_FIELD
            pos += key_length
        value_length, pos = _varint(pos, limit)
        if pos == 0:
            return BAD_VARINT
        value = pos
        if value_length >= 0:
            if value_length > end - pos:
                return BAD_FIELD
            pos += value_length

        header_count, pos = _varint(pos, limit)
        if pos == 0:
            return BAD_VARINT
        if header_count < 0:
            return BAD_HEADERS
        for _ in range(header_count):
            header_length, pos = _varint(pos, limit)
            if pos == 0:
                return BAD_VARINT
            if header_length < 0:
                return BAD_HEADERS
            if header_length > end - pos:
                return BAD_FIELD
            header_key = pos
            pos += header_length
            content_length, pos = _varint(pos, limit)
            if pos == 0:
                return BAD_VARINT
            if content_length > end - pos:
                return BAD_FIELD
            if header_ends != 0 and is_wanted:
                _copy(header_key_data + header_key_bytes, header_key, header_length)
                header_key_bytes += header_length
                if content_length >= 0:
                    _copy(header_value_data + header_value_bytes, pos, content_length)
                    header_value_bytes += content_length
                else:
                    header_value_nulls += 1
                _store_int8(header_value_validity + headers, content_length >= 0)
                headers += 1
                _store_int32(header_key_ends + 4 * headers, header_key_bytes)
                _store_int32(header_value_ends + 4 * headers, header_value_bytes)
            pos += max(content_length, 0)
        if pos != end:
            return BAD_END
        if not is_wanted:
            continue

        if key_data != 0:
            if key_length >= 0:
                _copy(key_data + key_bytes, key, key_length)
                key_bytes += key_length
            else:
                key_nulls += 1
            _store_int8(key_validity + rows, key_length >= 0)
            _store_int32(key_ends + 4 * (rows + 1), key_bytes)
        if value_data != 0:
            if value_length >= 0:
                _copy(value_data + value_bytes, value, value_length)
                value_bytes += value_length
            else:
                value_nulls += 1
            _store_int8(value_validity + rows, value_length >= 0)
            _store_int32(value_ends + 4 * (rows + 1), value_bytes)
        if header_ends != 0:
            _store_int32(header_ends + 4 * (rows + 1), headers)
        timestamp = append_timestamp if is_append_time != 0 else base_timestamp + timestamp
        timestamp = min(max(timestamp, -_MAX_TIMESTAMP_MS), _MAX_TIMESTAMP_MS)
        _store_int64(offsets + 8 * rows, offset)
        _store_int64(timestamps + 8 * rows, timestamp * 1000)
        _store_int32(timestamp_types + 4 * rows, is_append_time)
        rows += 1
    if pos != limit:
        return BAD_COUNT

    table[ROWS], table[KEY_BYTES], table[VALUE_BYTES] = rows, key_bytes, value_bytes
    table[KEY_NULLS], table[VALUE_NULLS] = key_nulls, value_nulls
    table[HEADERS], table[HEADER_VALUE_NULLS] = headers, header_value_nulls
    table[HEADER_KEY_BYTES], table[HEADER_VALUE_BYTES] = header_key_bytes, header_value_bytes
    return GOOD
