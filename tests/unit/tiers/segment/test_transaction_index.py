from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import CorruptSegmentError
from tiers.segment.indexes.segment_index import AbortedTransactionRange
from tiers.segment.indexes.transaction_index import (
    MARKER_NOT_COPIED,
    AbortedTxn,
    decode_aborted_ranges,
    decode_transaction_index,
    encode_aborted_ranges,
    encode_transaction_index,
    overlapping,
)

GOLDEN = bytes.fromhex("0000 0000000000000fa0 000000000000000a 0000000000000019 000000000000001a")

RANGES = st.lists(
    st.builds(
        lambda pid, first, length: AbortedTransactionRange(pid, first, min(first + length, MARKER_NOT_COPIED)),
        st.integers(0, 5),
        st.integers(0, 50),
        st.one_of(st.integers(1, 20), st.just(MARKER_NOT_COPIED)),
    ),
    max_size=12,
)


def test_an_entry_is_as_kafka_writes_it() -> None:
    entry = AbortedTxn(4000, 10, 25, 26)
    assert encode_transaction_index([entry]) == GOLDEN
    assert decode_transaction_index(GOLDEN) == [entry]


@pytest.mark.parametrize("damaged", [GOLDEN[:-1], b"\x00\x01" + GOLDEN[2:], GOLDEN + GOLDEN])
def test_a_damaged_file_is_corrupt(damaged: bytes) -> None:
    with pytest.raises(CorruptSegmentError):
        decode_transaction_index(damaged)


@given(RANGES)
def test_ranges_survive_encoding(ranges: list[AbortedTransactionRange]) -> None:
    assert list(decode_aborted_ranges(encode_aborted_ranges(ranges))) == ranges


@pytest.mark.parametrize("damaged", [b"x", encode_aborted_ranges([AbortedTransactionRange(1, 10, 9)])])
def test_ranges_that_cannot_be_are_corrupt(damaged: bytes) -> None:
    with pytest.raises(CorruptSegmentError):
        decode_aborted_ranges(damaged)


@given(RANGES, st.integers(0, 60), st.integers(0, 30))
def test_overlapping_keeps_the_emission_rules(
    ranges: list[AbortedTransactionRange], first_offset: int, length: int
) -> None:
    last_offset = first_offset + length
    found = overlapping(ranges, first_offset, last_offset)
    keys = [(one.first_offset, one.producer_id) for one in found]
    assert keys == sorted(set(keys))
    expected = {
        (one.first_offset, one.producer_id)
        for one in ranges
        if one.first_offset <= last_offset and one.last_offset >= first_offset
    }
    assert set(keys) == expected


def test_the_entry_with_the_marker_stays_for_a_transaction() -> None:
    without, with_marker = AbortedTransactionRange(7, 10, MARKER_NOT_COPIED), AbortedTransactionRange(7, 10, 50)
    assert overlapping([without, with_marker], 20, 60) == [with_marker]
    assert overlapping([with_marker, without], 20, 60) == [with_marker]
