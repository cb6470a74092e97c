"""The files of a segment that Kafka has too: each is Kafka's to the byte, and anything else is corrupt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.records.record_batch import crc32c
from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.indexes_object import decode_leader_epoch_checkpoint, encode_leader_epoch_checkpoint
from tiers.segment.indexes.segment_index import (
    AbortedTransactionRange,
    decode_aborted_ranges,
    encode_aborted_ranges,
    overlapping,
)
from tiers.segment.leader_epochs import EpochHole, epochs_begun
from tiers.segment.producer_state import (
    ProducerStateEntry,
    decode_producer_snapshot,
    encode_producer_snapshot,
)
from tiers.segment.transactions import (
    MARKER_NOT_COPIED,
    AbortedTxn,
    decode_transaction_index,
    encode_transaction_index,
)

T = 1_600_000_000_000
EPOCHS = b"0\n2\n0 0\n3 1500\n"
ABORTED = bytes.fromhex("0000 0000000000000fa0 000000000000000a 0000000000000019 000000000000001a")
SNAPSHOT = bytes.fromhex(
    "0001 c56b55e2 00000001 0000000000000fa0 0003 00000009 0000000000000063 00000009 00000174876e8000 00000007"
    "ffffffffffffffff"
)


def test_the_files_are_as_kafka_writes_them() -> None:
    epochs = (LeaderEpochEntry(0, 0), LeaderEpochEntry(3, 1500))
    assert (encode_leader_epoch_checkpoint(epochs), decode_leader_epoch_checkpoint(EPOCHS)) == (EPOCHS, epochs)
    aborted = [AbortedTxn(4000, 10, 25, 26)]
    assert (encode_transaction_index(aborted), decode_transaction_index(ABORTED)) == (ABORTED, aborted)
    producers = (ProducerStateEntry(4000, 3, 9, 99, 9, T, 7, -1),)
    assert (encode_producer_snapshot(producers), decode_producer_snapshot(SNAPSHOT)) == (SNAPSHOT, producers)
    assert decode_leader_epoch_checkpoint(encode_leader_epoch_checkpoint(())) == ()


def snapshot_of(content: bytes) -> bytes:
    return b"\x00\x01" + crc32c(content, 0, len(content)).to_bytes(4, "big") + content


@pytest.mark.parametrize(
    ("decode", "damaged"),
    [
        *(
            (decode_leader_epoch_checkpoint, text)
            for text in (
                b"",
                b"0\n",
                b"1\n0\n",
                b"0\n2\n0 0\n",
                b"0\n1\n0 0\n3 1500\n",
                b"0\n2\n3 0\n0 1500\n",
                b"0\n2\n0 1500\n3 0\n",
                b"0\n1\n0\n",
                b"0\n1\nx y\n",
                b"\xff\n",
            )
        ),
        *((decode_transaction_index, data) for data in (ABORTED[:-1], b"\x00\x01" + ABORTED[2:], ABORTED + ABORTED)),
        (decode_aborted_ranges, b"x"),
        (decode_aborted_ranges, encode_aborted_ranges([AbortedTransactionRange(1, 10, 9)])),
        (decode_producer_snapshot, snapshot_of(b"\xff\xff\xff\xff")),
        (decode_producer_snapshot, snapshot_of(b"\x00\x00\x00\x02" + SNAPSHOT[10:] * 2)),
    ],
)
def test_anything_else_is_corrupt(decode: Callable[[bytes], object], damaged: bytes) -> None:
    with pytest.raises(CorruptSegmentError):
        decode(damaged)


int16s, int32s, int64s = (st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (16, 32, 64))
PRODUCERS = st.lists(
    st.builds(ProducerStateEntry, int64s, int16s, int32s, int64s, int32s, int64s, int32s, int64s),
    max_size=5,
    unique_by=lambda entry: entry.producer_id,
).map(tuple)


@given(PRODUCERS, st.data())
def test_a_snapshot_reads_back_and_no_damage_is_overlooked(
    entries: tuple[ProducerStateEntry, ...], data: st.DataObject
) -> None:
    whole = encode_producer_snapshot(entries)
    assert decode_producer_snapshot(whole) == entries
    damaged = bytearray(whole)
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    for wrong in (bytes(damaged), whole[: data.draw(st.integers(0, len(whole) - 1))], whole + b"\x00"):
        with pytest.raises(CorruptSegmentError):
            decode_producer_snapshot(wrong)


RANGES = st.lists(
    st.builds(
        lambda pid, first, length: AbortedTransactionRange(pid, first, min(first + length, MARKER_NOT_COPIED)),
        st.integers(0, 5),
        st.integers(0, 50),
        st.one_of(st.integers(1, 20), st.just(MARKER_NOT_COPIED)),
    ),
    max_size=12,
)


@given(RANGES, st.integers(0, 60), st.integers(0, 30))
def test_overlapping_ranges_come_sorted_and_once_with_the_marker(
    ranges: list[AbortedTransactionRange], first_offset: int, length: int
) -> None:
    assert list(decode_aborted_ranges(encode_aborted_ranges(ranges))) == ranges
    last_offset = first_offset + length
    within = [one for one in ranges if one.first_offset <= last_offset and one.last_offset >= first_offset]
    latest_first = sorted(within, key=lambda one: -one.last_offset)
    found = {(one.first_offset, one.producer_id): one for one in latest_first}
    assert overlapping(ranges, first_offset, last_offset) == [found[key] for key in sorted(found)]


HOLE = EpochHole(3, 10, 5, 200)
Epochs = list[tuple[int, int]]


def entries(pairs: Epochs) -> list[LeaderEpochEntry]:
    return [LeaderEpochEntry(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("hole", "named", "begun"),
    [
        (HOLE, [], [(5, 200)]),  # nothing is named
        (HOLE, [(5, 150)], [(5, 150)]),
        (HOLE, [(5, 10)], [(5, 10)]),  # it begins with the hole
        (HOLE, [(5, 200)], [(5, 200)]),  # it begins after the hole
        (HOLE, [(4, 120), (5, 150)], [(4, 120), (5, 150)]),
        (HOLE, [(4, 120)], [(4, 120), (5, 200)]),
        (HOLE, [(2, 20), (3, 30), (5, 150), (6, 160)], [(5, 150)]),  # known and later epochs are ignored
        (HOLE, [(4, 9), (5, 201)], [(5, 200)]),  # starts outside of the hole are ignored
        (EpochHole(3, 10, 5, 10), [(4, 10)], [(5, 10)]),  # no hole
        (EpochHole(3, 10, 5, 8), [(5, 9)], [(5, 8)]),
        (EpochHole(-1, 10, 5, 200), [(4, 120), (5, 150)], [(4, 10), (5, 150)]),  # no epoch is known before it
        (EpochHole(-1, 10, 5, 200), [], [(5, 10)]),
        (EpochHole(-1, 10, 5, 8), [], [(5, 8)]),
    ],
)
def test_the_epochs_that_begin_in_a_hole_are_the_named_ones(hole: EpochHole, named: Epochs, begun: Epochs) -> None:
    assert epochs_begun(hole, entries(named)) == entries(begun)
