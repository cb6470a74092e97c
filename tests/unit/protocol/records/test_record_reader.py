from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecords

from protocol.errors import CorruptBatchError
from protocol.records.compression import decompress
from protocol.records.record_batch import CODEC_GZIP, CODEC_LZ4, CODEC_NONE, CODEC_SNAPPY, CODEC_ZSTD, iterate_batches
from protocol.records.record_reader import Record, TimestampAndOffset, first_record_at_or_after, read_records
from tests.support.fakes.record_batches import (
    build_batch,
    compress,
    control_batch,
    legacy_message,
    legacy_wrapper,
    record,
)

CODECS = [CODEC_NONE, CODEC_GZIP, CODEC_SNAPPY, CODEC_LZ4, CODEC_ZSTD]

payloads = st.none() | st.binary(max_size=200)
headers = st.lists(st.tuples(st.text(max_size=8), payloads), max_size=3)


@st.composite
def record_lists(draw: st.DrawFn) -> list[Record]:
    offset = draw(st.integers(0, 2**40))
    records = []
    for _ in range(draw(st.integers(1, 6))):
        timestamp = draw(st.integers(0, 2**45))
        records.append(record(offset, timestamp, draw(payloads), draw(payloads), draw(headers)))
        offset += draw(st.integers(1, 300))
    return records


def read_all(log: bytes) -> list[Record]:
    return [r for batch in iterate_batches(log) for r in read_records(log, batch)]


@given(record_lists(), st.sampled_from(CODECS), st.booleans())
def test_records_of_every_codec(records: list[Record], codec: int, xerial: bool) -> None:
    assert read_all(build_batch(records[0].offset, records, codec=codec, xerial=xerial)) == records


@given(record_lists(), st.sampled_from([CODEC_NONE, CODEC_GZIP]))
def test_records_are_what_kafka_python_reads(records: list[Record], codec: int) -> None:
    log = build_batch(records[0].offset - records[0].offset % 7, records, codec=codec)
    theirs = [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for batch in MemoryRecords(log) for r in batch]
    assert read_all(log) == theirs


@given(record_lists(), st.sampled_from([0, 1]), st.sampled_from([CODEC_GZIP, CODEC_SNAPPY, CODEC_LZ4]))
def test_legacy_wrappers(records: list[Record], magic: int, codec: int) -> None:
    records = [r._replace(headers=(), timestamp=r.timestamp if magic else -1) for r in records]
    log = legacy_wrapper(magic, records[0].offset, records, codec)
    assert read_all(log) == records
    if codec == CODEC_GZIP:
        theirs = [(r.offset, -1 if magic == 0 else r.timestamp, r.key, r.value) for b in MemoryRecords(log) for r in b]
        assert [r[:4] for r in records] == theirs


def test_plain_legacy_messages() -> None:
    log = legacy_message(0, 4, -1, b"k", None) + legacy_message(1, 5, 77, None, b"v")
    assert read_all(log) == [Record(4, -1, b"k", None, ()), Record(5, 77, None, b"v", ())]


@given(record_lists(), st.sampled_from(CODECS), st.data())
def test_a_look_up_finds_the_first_record_late_enough(records: list[Record], codec: int, data: st.DataObject) -> None:
    log = build_batch(records[0].offset, records, codec=codec)
    (batch,) = iterate_batches(log)
    timestamp = data.draw(st.sampled_from([r.timestamp for r in records])) + data.draw(st.integers(-1, 1))
    min_offset = data.draw(st.sampled_from([r.offset for r in records])) + data.draw(st.integers(-1, 1))
    expected = next(
        (
            TimestampAndOffset(r.timestamp, r.offset)
            for r in records
            if r.timestamp >= timestamp and r.offset >= min_offset
        ),
        None,
    )
    assert first_record_at_or_after(log, batch, timestamp, min_offset) == expected


def test_under_log_append_time_every_record_has_the_batch_timestamp() -> None:
    records = [record(3, 10), record(5, 20)]
    log = build_batch(3, records, log_append_time_ms=9000, codec=CODEC_ZSTD)
    (batch,) = iterate_batches(log)
    assert [r.timestamp for r in read_records(log, batch)] == [9000, 9000]
    assert first_record_at_or_after(log, batch, 9000, 4) == (9000, 5)
    assert first_record_at_or_after(log, batch, 9001) is None
    wrapper = legacy_wrapper(1, 3, records, CODEC_GZIP, log_append_time_ms=9000)
    (message,) = iterate_batches(wrapper)
    assert first_record_at_or_after(wrapper, message, 15, 0) == (9000, 3)


def test_control_records_count_in_look_ups() -> None:
    log = control_batch(40, commit=True, producer_id=1, timestamp=500)
    (batch,) = iterate_batches(log)
    assert first_record_at_or_after(log, batch, 500) == (500, 40)


@pytest.mark.parametrize("frame", ["05224d18 6040 82", "04224d18 4040 82", "04224d18 6000 82"])
def test_lz4_frames_that_are_not_read(frame: str) -> None:
    with pytest.raises(CorruptBatchError, match="lz4 frame with"):
        decompress(CODEC_LZ4, bytes.fromhex(frame) + bytes(4))


def test_an_unknown_codec() -> None:
    with pytest.raises(CorruptBatchError, match="codec 7"):
        decompress(7, b"abc")


def test_a_legacy_look_up() -> None:
    records = [record(3, 10), record(4, 30), record(5, 20)]
    log = legacy_wrapper(1, 3, records, CODEC_GZIP)
    (batch,) = iterate_batches(log)
    assert first_record_at_or_after(log, batch, 15) == (30, 4)
    assert first_record_at_or_after(log, batch, 15, 5) == (20, 5)
    assert first_record_at_or_after(log, batch, 25, 5) is None


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (legacy_message(1, 5, 0, None, None, attributes=CODEC_GZIP), "has no value"),
        (legacy_message(1, 5, 0, None, compress(CODEC_GZIP, b""), attributes=CODEC_GZIP), "no plain message set"),
        (
            legacy_message(
                1, 5, 0, None, compress(CODEC_GZIP, legacy_message(0, 0, 0, None, b"v")), attributes=CODEC_GZIP
            ),
            "no plain message set",
        ),
    ],
)
def test_legacy_wrappers_that_cannot_be(message: bytes, complaint: str) -> None:
    with pytest.raises(CorruptBatchError, match=complaint):
        read_all(message)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("tail_bytes", [5, 20])
def test_a_part_of_a_message_ends_a_wrapper(magic: int, tail_bytes: int) -> None:
    inner = b"".join(legacy_message(magic, 3 * (1 - magic) + n, 7, b"k", b"%d" % n) for n in range(2))
    value = compress(CODEC_GZIP, inner + inner[:tail_bytes])
    found = read_all(legacy_message(magic, 4, 7, None, value, attributes=CODEC_GZIP))
    assert [(each.offset, each.value) for each in found] == [(3, b"0"), (4, b"1")]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ("00000009 6b 00000000", "9 bytes"),  # a key beyond the message
        ("00000004 00000000", "a length at 26"),  # no room for the value's length
        ("ffffffff 00000001 76 00", "ends at 27 instead of 28"),  # a byte after the value
    ],
)
def test_legacy_fields_that_do_not_fill_their_message(fields: str, complaint: str) -> None:
    message = bytearray(legacy_message(0, 5, 0, None, None)[:18] + bytes.fromhex(fields))
    message[8:12] = (len(message) - 12).to_bytes(4, "big")
    with pytest.raises(CorruptBatchError, match=complaint):
        read_all(bytes(message))


@pytest.mark.parametrize(
    "body",
    [
        "ff" * 11,  # a varint of eleven bytes
        "80",  # a varint that does not end
        "7e 00 00 00",  # a record of 63 bytes in three
        "02 00 00 00 01 01 00",  # a length that ends before its key
        "0c 00 00 00 01 01 02",  # one header, that is not there
        "10 00 00 00 01 01 00 00 00",  # bytes after the last header
        "0e 00 00 00 14 01 01 00",  # a key longer than its record
    ],
)
def test_records_that_cannot_be(body: str) -> None:
    records = bytearray(build_batch(0, [record(0)]))
    log = bytearray(records[:61] + bytes.fromhex(body))
    log[8:12] = (len(log) - 12).to_bytes(4, "big")
    with pytest.raises(CorruptBatchError):
        read_all(bytes(log))
