from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.records.record_batch import crc32c
from tiers.errors import CorruptSegmentError
from tiers.segment.indexes.producer_snapshot import (
    ProducerStateEntry,
    decode_producer_snapshot,
    encode_producer_snapshot,
)

ENTRY = ProducerStateEntry(4000, 3, 9, 99, 9, 1_600_000_000_000, 7, -1)
VECTOR = bytes.fromhex(
    "0001 c56b55e2 00000001 0000000000000fa0 0003 00000009 0000000000000063 00000009 00000174876e8000 00000007"
    "ffffffffffffffff"
)
int16s, int32s, int64s = (st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (16, 32, 64))
ENTRIES = st.lists(
    st.builds(ProducerStateEntry, int64s, int16s, int32s, int64s, int32s, int64s, int32s, int64s),
    max_size=5,
    unique_by=lambda entry: entry.producer_id,
).map(tuple)


def test_the_snapshot_of_the_specification() -> None:
    assert encode_producer_snapshot([ENTRY]) == VECTOR
    assert decode_producer_snapshot(VECTOR) == (ENTRY,)
    assert decode_producer_snapshot(encode_producer_snapshot([])) == ()


@given(ENTRIES)
def test_a_written_snapshot_is_read_back(entries: tuple[ProducerStateEntry, ...]) -> None:
    assert decode_producer_snapshot(encode_producer_snapshot(entries)) == entries


@given(st.data())
def test_no_flipped_bit_and_no_lost_byte_goes_unnoticed(data: st.DataObject) -> None:
    whole = encode_producer_snapshot(data.draw(ENTRIES))
    damaged = bytearray(whole)
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    for wrong in (bytes(damaged), whole[: data.draw(st.integers(0, len(whole) - 1))], whole + b"\x00"):
        with pytest.raises(CorruptSegmentError):
            decode_producer_snapshot(wrong)


def test_an_impossible_count_and_a_repeated_producer_are_corrupt() -> None:
    for content in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x02" + VECTOR[10:] * 2):
        crc = crc32c(content, 0, len(content)).to_bytes(4, "big")
        with pytest.raises(CorruptSegmentError):
            decode_producer_snapshot(b"\x00\x01" + crc + content)
