"""The compiled decoder and the Python decoder accept the same records, and refuse the same records."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decode.kernel_cache import load_kernels
from pipeline.decode.kernel_decoder import KernelDecoder
from pipeline.decode.python_decoder import PythonDecoder
from pipeline.decode.record_columns import ALL_COLUMNS, RecordColumns
from protocol.errors import CorruptBatchError
from protocol.records.record_batch import RecordBatch, iterate_batches
from tests.support.fakes.record_batches import build_batch, record

Decoder = PythonDecoder | KernelDecoder


def kernel_decoder(columns: RecordColumns) -> KernelDecoder:
    kernels = load_kernels()
    assert kernels is not None
    return KernelDecoder(columns, kernels)


BOTH = pytest.mark.parametrize("decoder_of", [PythonDecoder, kernel_decoder])


def header(count: int, last_delta: int = 5, base_timestamp: int = 0) -> RecordBatch:
    batch = build_batch(100, [record(100, base_timestamp)], last_offset=100 + last_delta)
    return next(iterate_batches(batch))._replace(records_count=count)


def decoded(decoder: Decoder, records: bytes, count: int = 1, base_timestamp: int = 0) -> list[dict[str, object]]:
    decoder.add(header(count, base_timestamp=base_timestamp), records, 0, 1 << 62)
    arrays = decoder.take()
    arrays["timestamp"] = arrays["timestamp"].cast(pa.int64())
    return pa.RecordBatch.from_pydict(arrays).to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types


def row(**other: object) -> dict[str, object]:
    plain = {"key": None, "value": b"", "offset": 100, "timestamp": 0, "timestampType": 0, "headers": None}
    return {**plain, **other}


@BOTH
@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ("0c 00 00 00 01 00 00", row()),
        ("0e 07 00 00 01 02 76 00", row(value=b"v")),  # attributes say nothing
        ("0c 00 00 00 03 05 00", row(value=None)),  # lengths below -1
        ("1e 00 00 80 80 80 80 80 80 80 80 80 00 01 00 00", row()),  # ten bytes, as many as there may be
        ("12 00 00 00 01 00 02 02 ff 01", row(headers=[{"key": "\ufffd", "value": None}])),
        ("10 00 00 00 01 00 02 00 00", row(headers=[{"key": "", "value": b""}])),
    ],
)
def test_records_that_may_be(
    decoder_of: Callable[[RecordColumns], Decoder], records: str, expected: dict[str, object]
) -> None:
    decoder = decoder_of(ALL_COLUMNS)
    assert decoded(decoder, bytes.fromhex(records)) == [expected]


@BOTH
@pytest.mark.parametrize(
    "records",
    [
        "",  # none at all
        "0c 00 00 00 01 00",  # cut short
        "0c 00 00 00 01 00 00 00",  # a byte after the last
        "10 00 00 8a 00 01 00 00",  # a varint longer than it has to be, and than its record
        "0c 00 00 00 01 00 00 0c 00 00 00 01 00 00",  # more records than the batch counts
        "0a 00 00 00 01 00 00",  # ends after its length
        "0e 00 00 00 01 00 00 00",  # ends before its length
        "01 00 00 00 01 00 00",  # a length below zero
        "ff ff ff ff ff ff ff ff ff ff 00",  # a varint of eleven bytes
        "1e 00 00 80 80 80 80 80 80 80 80 80 02 01 00 00",  # a varint of 65 bits
        "fe ff ff ff ff ff ff ff ff 01 00 00 00 01 00 00",  # a length that would overflow
        "0c 00 00 0c 01 00 00",  # an offset behind the batch's
        "0c 00 00 01 01 00 00",  # an offset before it
        "0e 00 00 00 14 01 01 00",  # a key longer than its record
        "20 00 00 00 fe ff ff ff ff ff ff ff ff 01 00 00 00",  # a key that would overflow
        "0c 00 00 00 01 02 00",  # a value longer than its record
        "0c 00 00 00 01 00 01",  # headers below none
        "0c 00 00 00 01 00 02",  # a header that is not there
        "1e 00 00 00 01 00 fe ff ff ff ff ff ff ff ff 01",  # more headers than there are bytes
        "10 00 00 00 01 00 02 01 00",  # a header without a key
        "10 00 00 00 01 00 02 02 00",  # a header's key longer than its record
        "10 00 00 00 01 00 02 00 02",  # and its value
    ],
)
def test_records_that_cannot_be(decoder_of: Callable[[RecordColumns], Decoder], records: str) -> None:
    decoder = decoder_of(ALL_COLUMNS)
    good = bytes.fromhex("10 00 00 00 01 00 02 00 01")
    decoder.add(header(1), good, 0, 1 << 62)
    with pytest.raises(CorruptBatchError):
        decoder.add(header(2), good + bytes.fromhex(records), 0, 1 << 62)
    assert len(decoder) == 1
    decoder.add(header(1), good, 0, 1 << 62)
    arrays = decoder.take()
    assert arrays["headers"].to_pylist() == [[{"key": "", "value": None}]] * 2
    assert arrays["value"].to_pylist() == [b"", b""]
    assert len(decoder) == 0


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
def test_timestamps_wrap_as_in_java_and_fit_into_microseconds(base: int, delta: int) -> None:
    zigzag = (delta << 1 ^ delta >> 63) & (1 << 64) - 1
    varint = bytearray()
    while zigzag >= 0x80:
        varint.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    varint.append(zigzag)
    body = b"\x00" + varint + b"\x00\x01\x01\x00"
    wrapped = (base + delta + (1 << 63)) % (1 << 64) - (1 << 63)
    limit = ((1 << 63) - 1) // 1000
    for decoder_of in (PythonDecoder, kernel_decoder):
        (found,) = decoded(decoder_of(ALL_COLUMNS), struct.pack("B", 2 * len(body)) + body, base_timestamp=base)
        assert found["timestamp"] == max(-limit, min(wrapped, limit)) * 1000


@BOTH
@pytest.mark.parametrize("names", [("offset",), ("value",), ("key", "headers"), ("timestampType", "timestamp")])
def test_only_what_is_wanted(decoder_of: Callable[[RecordColumns], Decoder], names: Sequence[str]) -> None:
    decoder = decoder_of(RecordColumns(tuple(names)))
    decoder.add(header(1), bytes.fromhex("10 00 00 00 01 00 02 00 01"), 0, 1 << 62)
    assert decoder.take().keys() == set(names)
