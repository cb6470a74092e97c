from __future__ import annotations

import struct

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecords

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import (
    CODEC_GZIP,
    crc32c,
    crc_matches,
    cut_at_batches,
    iterate_batches,
    skip_to_offset,
    verify_batches,
    verify_crc,
)
from tests.support.fakes.record_batches import (
    batch_of,
    build_batch,
    control_batch,
    legacy_message,
    legacy_wrapper,
    record,
)

ABORT_AT_25 = bytes.fromhex(
    "0000000000000019"  # base offset 25
    "00000042"  # length: 66 bytes follow
    "00000005"  # leader epoch 5
    "02"  # magic
    "0d18561a"  # CRC-32C
    "0030"  # transactional, control
    "00000000"  # last offset delta
    "00000174876e8000 00000174876e8000"  # base and max timestamp
    "0000000000000fa0 0003 ffffffff"  # producer 4000, epoch 3, no sequence
    "00000001"  # one record
    "20 00 00 00 08 00000000 0c 00000000 0007 00"  # key: version 0, ABORT; value: version 0, coordinator epoch 7
)

batch_sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 60)), max_size=8)


def log_of(sizes: list[tuple[int, int]], first_offset: int = 100, gap: int = 0) -> list[bytes]:
    batches = []
    offset = first_offset
    for count, value_bytes in sizes:
        batches.append(batch_of(offset, count, value_bytes=value_bytes))
        offset += count + gap
    return batches


def test_an_abort_marker() -> None:
    (batch,) = verify_batches(ABORT_AT_25)
    assert (batch.start, batch.end, batch.base_offset, batch.last_offset, batch.next_offset) == (0, 78, 25, 25, 26)
    assert (batch.leader_epoch, batch.producer_id, batch.producer_epoch, batch.base_sequence) == (5, 4000, 3, -1)
    assert batch.is_control
    assert batch.is_transactional
    assert not batch.is_log_append_time
    assert batch.max_timestamp == 1_600_000_000_000
    assert batch.records_count == 1
    assert control_batch(25, commit=False, producer_id=4000, producer_epoch=3, leader_epoch=5) == ABORT_AT_25


@given(
    st.binary(min_size=1, max_size=40), st.integers(1, 5000), st.integers(0, 70), st.integers(0, 70), st.integers(0, 9)
)
def test_crc32c_is_what_another_library_makes_of_it(unit: bytes, times: int, start: int, end: int, cut: int) -> None:
    data = unit * times
    first, last = start, max(start, len(data) - end)
    expected = google_crc32c.value(data[first:last])
    assert crc32c(data, first, last) == expected
    assert crc32c(memoryview(bytearray(data)), first, last) == expected
    middle = first + (last - first) * cut // 9
    assert crc32c(data, middle, last, crc32c(data, first, middle)) == expected


@given(batch_sizes)
def test_headers_are_what_kafka_python_reads(sizes: list[tuple[int, int]]) -> None:
    log = b"".join(log_of(sizes))
    theirs = MemoryRecords(log)
    for batch in iterate_batches(log):
        their_batch = theirs.next_batch()
        assert batch.base_offset == their_batch.base_offset
        assert batch.last_offset == their_batch.last_offset
        assert batch.leader_epoch == their_batch.leader_epoch
        assert batch.max_timestamp == their_batch.max_timestamp
        assert batch.codec == their_batch.compression_type
        assert batch.records_count == their_batch.records_count
        assert batch.crc == their_batch.crc
        assert batch.size_bytes == their_batch.size_in_bytes
        assert crc_matches(log, batch)
    assert not theirs.has_next()


@given(batch_sizes.filter(bool), st.data())
def test_a_flipped_bit_under_the_crc_is_found(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    log = bytearray(b"".join(log_of(sizes)))
    batches = list(iterate_batches(log))
    batch = data.draw(st.sampled_from(batches))
    position = data.draw(st.integers(batch.start + 17, batch.end - 1))
    log[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptBatchError):
        verify_batches(log)


@pytest.mark.parametrize(
    ("position", "layout", "value"),
    [
        (8, ">i", 13),
        (8, ">i", -1),
        (8, ">i", 48),
        (16, ">b", 3),
        (16, ">b", -1),
        (23, ">i", -1),
        (57, ">i", -1),
        (0, ">q", -1),
    ],
)
def test_a_header_that_cannot_be(position: int, layout: str, value: int) -> None:
    log = bytearray(batch_of(5, 2))
    struct.pack_into(layout, log, position, value)
    with pytest.raises(CorruptBatchError):
        list(iterate_batches(log))


def test_offsets_must_ascend_and_epochs_must_not_fall() -> None:
    verify_batches(batch_of(0, 3) + batch_of(3, 1) + batch_of(9, 1))
    with pytest.raises(CorruptBatchError, match="offset 2 after 2"):
        verify_batches(batch_of(0, 3) + batch_of(2, 3))
    with pytest.raises(CorruptBatchError, match="leader epoch 3 after 4"):
        verify_batches(batch_of(0, 3, leader_epoch=4) + batch_of(3, 1, leader_epoch=3))


def test_an_older_format_without_epochs_may_follow_a_newer_one() -> None:
    newer, older = batch_of(0, 3, leader_epoch=4), legacy_message(1, 3, 5, b"k", b"v")
    assert [batch.magic for batch in verify_batches(newer + older + batch_of(4, 1, leader_epoch=4))] == [2, 1, 2]
    with pytest.raises(CorruptBatchError, match="leader epoch 3 after 4"):
        verify_batches(newer + older + batch_of(4, 1, leader_epoch=3))


def test_the_first_batch_must_reach_the_expected_offset() -> None:
    assert len(verify_batches(batch_of(10, 5), expected_next_offset=14)) == 1
    assert len(verify_batches(batch_of(10, 5), expected_next_offset=3)) == 1
    with pytest.raises(CorruptBatchError):
        verify_batches(batch_of(10, 5), expected_next_offset=15)


@given(batch_sizes, st.integers(0, 900), st.booleans(), st.integers(0, 30))
def test_cutting_keeps_the_longest_prefix_of_whole_batches(
    sizes: list[tuple[int, int]], max_bytes: int, min_one: bool, tail: int
) -> None:
    batches = log_of(sizes)
    log = b"".join(batches) + batch_of(10_000, 3, value_bytes=30)[:tail]
    cut = cut_at_batches(log, max_bytes, min_one)
    ends = [sum(map(len, batches[:i])) for i in range(len(batches) + 1)]
    expected = max(end for end in ends if end <= max_bytes)
    if expected == 0 and min_one and batches:
        expected = ends[1]
    assert cut == expected


@given(batch_sizes, st.integers(95, 150), st.integers(0, 2))
def test_skipping_finds_the_first_batch_that_reaches_the_offset(
    sizes: list[tuple[int, int]], offset: int, gap: int
) -> None:
    log = b"".join(log_of(sizes, gap=gap))
    expected = next((b.start for b in iterate_batches(log) if b.last_offset >= offset), len(log))
    assert skip_to_offset(log, offset) == expected


def test_an_empty_batch_that_compaction_left_still_covers_its_offsets() -> None:
    log = batch_of(0, 2) + build_batch(2, [], last_offset=8) + batch_of(9, 1)
    assert [(b.base_offset, b.last_offset, b.records_count) for b in verify_batches(log)] == [
        (0, 1, 2),
        (2, 8, 0),
        (9, 9, 1),
    ]
    assert skip_to_offset(log, 5) == len(batch_of(0, 2))


@pytest.mark.parametrize("magic", [0, 1])
def test_legacy_messages_stand_beside_new_batches(magic: int) -> None:
    plain = legacy_message(magic, 6, 1000, b"k", b"v")
    empty = legacy_message(magic, 7, 1000, None, None)
    wrapper = legacy_wrapper(magic, 8, [record(8, 1000), record(9, 2000)], CODEC_GZIP)
    log = plain + empty + wrapper + batch_of(10, 2)
    batches = verify_batches(log, expected_next_offset=6)
    assert [(b.magic, b.last_offset, b.codec) for b in batches] == [
        (magic, 6, 0),
        (magic, 7, 0),
        (magic, 9, 1),
        (2, 11, 0),
    ]
    assert [b.max_timestamp for b in batches[:3]] == ([-1, -1, -1] if magic == 0 else [1000, 1000, 2000])
    assert not batches[0].is_control
    assert skip_to_offset(log, 8) == len(plain + empty)
    assert cut_at_batches(log, len(plain) + 1, min_one=False) == len(plain)
    damaged = bytearray(log)
    damaged[len(plain) - 1] ^= 1
    with pytest.raises(CorruptBatchError):
        verify_crc(damaged, batches[0])


@pytest.mark.parametrize(
    ("position", "value"), [(8, b"\x00\x00\x00\x0d"), (8, b"\xff\xff\xff\xff"), (16, b"\x03"), (16, b"\xff")]
)
def test_a_tail_that_cannot_become_a_batch(position: int, value: bytes) -> None:
    log = bytearray(batch_of(5, 2)[:40])
    log[position : position + len(value)] = value
    with pytest.raises(CorruptBatchError):
        list(iterate_batches(log))
    with pytest.raises(CorruptBatchError):
        skip_to_offset(log, 0)
    if position == 8:
        with pytest.raises(CorruptBatchError):
            cut_at_batches(log, 1000, min_one=False)


def test_a_tail_shorter_than_its_magic_is_judged_by_its_length() -> None:
    log = bytearray(batch_of(5, 2)[:16])
    assert list(iterate_batches(log)) == []
    log[8:12] = b"\x00\x00\x00\x0d"
    with pytest.raises(CorruptBatchError, match="length 13"):
        list(iterate_batches(log))
