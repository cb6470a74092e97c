from __future__ import annotations

import pytest

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import RecordBatch, iterate_batches
from tests.support.fakes.record_batches import build_batch, control_batch, record
from tiers.segment.control_record import EndTransactionMarker, end_transaction_marker

MARKER = bytes.fromhex(
    "00000000000000190000004200000005020d18561a00300000000000000174876e800000000174876e80000000000000000fa00003"
    "ffffffff000000012000000008000000000c00000000000700"
)


def only(log: bytes) -> RecordBatch:
    (batch,) = iterate_batches(log)
    return batch


def test_markers_say_how_a_transaction_ended() -> None:
    for commit in (False, True):
        log = control_batch(25, commit=commit, producer_id=4000)
        assert end_transaction_marker(log, only(log)) == EndTransactionMarker(4000, 25, not commit, 7)
    assert end_transaction_marker(MARKER, only(MARKER)) == EndTransactionMarker(4000, 25, True, 7)


def test_a_batch_that_is_no_marker_says_nothing() -> None:
    emptied = build_batch(25, [], producer_id=4000, transactional=True, control=True)
    leader_change = build_batch(25, [record(25, key=b"\x00\x00\x00\x02", value=b"any")], control=True)
    for log in (emptied, leader_change):
        assert end_transaction_marker(log, only(log)) is None


@pytest.mark.parametrize("kept", range(16))
def test_a_marker_that_is_cut_short_is_corrupt(kept: int) -> None:
    cut = MARKER[:8] + (49 + kept).to_bytes(4, "big") + MARKER[12 : 61 + kept]
    with pytest.raises(CorruptBatchError):
        end_transaction_marker(cut, only(cut))


def test_a_length_without_an_end_is_corrupt() -> None:
    endless = MARKER[:8] + (49 + 7).to_bytes(4, "big") + MARKER[12:61] + b"\xff" * 7
    with pytest.raises(CorruptBatchError):
        end_transaction_marker(endless, only(endless))
