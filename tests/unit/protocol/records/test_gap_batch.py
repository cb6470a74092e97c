from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecords

from protocol.records.gap_batch import MAX_OFFSETS, gap_batch
from protocol.records.record_batch import verify_batches
from tests.support.fakes.record_batches import control_batch

offsets = st.integers(1, (1 << 62) - 1)
versions = st.integers(4, 18)


def test_it_is_a_commit_marker_of_no_producer() -> None:
    real = control_batch(99, commit=True, producer_id=4000, producer_epoch=3, leader_epoch=5)
    made = gap_batch(12, 50, 100, 5)
    assert made[-16:-6] == real[-16:-6]  # its record, up to the epoch of the coordinator
    (batch,) = verify_batches(made)
    assert (batch.base_offset, batch.next_offset, batch.leader_epoch, batch.records_count) == (99, 100, 5, 1)
    assert batch.is_control
    assert not batch.is_transactional
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (-1, -1, -1)


@given(versions, offsets, st.integers(1, MAX_OFFSETS), st.integers(-1, 1 << 30))
def test_a_client_goes_on_behind_the_gap(version: int, fetch_offset: int, count: int, leader_epoch: int) -> None:
    next_offset = fetch_offset + count
    made = gap_batch(version, fetch_offset, next_offset, leader_epoch)
    (batch,) = verify_batches(made, fetch_offset)
    assert (batch.next_offset, batch.leader_epoch, batch.size_bytes) == (next_offset, leader_epoch, len(made))
    records = MemoryRecords(made)
    read = records.next_batch()
    assert read.validate_crc()
    assert read.is_control_batch
    assert read.next_offset == next_offset
    (marker,) = read
    assert marker.offset == (fetch_offset - 1 if version <= 10 else next_offset - 1)
    assert not records.has_next()


@given(offsets)
def test_where_one_batch_does_not_reach_the_end_it_takes_the_client_ahead(fetch_offset: int) -> None:
    (batch,) = verify_batches(gap_batch(10, fetch_offset, fetch_offset + MAX_OFFSETS + 1, 0))
    assert batch.next_offset == fetch_offset + MAX_OFFSETS
    (batch,) = verify_batches(gap_batch(11, fetch_offset, fetch_offset + MAX_OFFSETS + 1, 0))
    assert batch.next_offset == fetch_offset + MAX_OFFSETS + 1


@pytest.mark.parametrize(("fetch_offset", "next_offset"), [(5, 5), (5, 4), (0, 4)])
def test_a_range_that_is_no_gap_is_refused(fetch_offset: int, next_offset: int) -> None:
    with pytest.raises(ValueError, match="no gap"):
        gap_batch(12, fetch_offset, next_offset, 0)
