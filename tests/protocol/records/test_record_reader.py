from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecords

from protocol.errors import CorruptBatchError
from protocol.records.compression import decompress
from protocol.records.record_batch import CODEC_GZIP, CODEC_LZ4, CODEC_NONE, CODEC_SNAPPY, CODEC_ZSTD, iterate_batches
from protocol.records.record_reader import Record, TimestampAndOffset, first_record_at_or_after, read_records
from tests.fakes.record_batches import (
    batch_of,
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


def test_an_empty_batch_answers_nothing() -> None:
    log = build_batch(2, [], last_offset=8)
    (batch,) = iterate_batches(log)
    assert list(read_records(log, batch)) == []
    assert first_record_at_or_after(log, batch, -1) is None


@given(st.sampled_from(CODECS), st.data())
def test_damage_raises_nothing_but_corrupt_batch(codec: int, data: st.DataObject) -> None:
    log = bytearray(batch_of(0, 20, value_bytes=30, codec=codec))
    (batch,) = iterate_batches(log)
    for position in data.draw(st.lists(st.integers(61, len(log) - 1), min_size=1, max_size=4)):
        log[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptBatchError):
        list(read_records(log, batch))


@pytest.mark.parametrize("codec", CODECS[1:])
def test_output_is_bounded(codec: int) -> None:
    packed = compress(codec, b"\x00" * 1_000_000)
    assert bytes(decompress(codec, packed)) == b"\x00" * 1_000_000
    with pytest.raises(CorruptBatchError, match="beyond 999999"):
        decompress(codec, packed, max_bytes=999_999)


def test_an_unknown_codec() -> None:
    with pytest.raises(CorruptBatchError, match="codec 7"):
        decompress(7, b"abc")
