from __future__ import annotations

import pytest

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import build_batch, control_batch, record
from tiers.segment.control_record import EndTransactionMarker, end_transaction_marker

MARKER = bytes.fromhex(
    "00000000000000190000004200000005020d18561a00300000000000000174876e800000000174876e80000000000000000fa00003"
    "ffffffff000000012000000008000000000c00000000000700"
)
EMPTIED = build_batch(25, [], producer_id=4000, transactional=True, control=True)
LEADER_CHANGE = build_batch(25, [record(25, key=b"\x00\x00\x00\x02", value=b"any")], control=True)


def marker_of(log: bytes) -> EndTransactionMarker | None:
    (batch,) = iterate_batches(log)
    return end_transaction_marker(log, batch)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (MARKER, EndTransactionMarker(4000, 25, True, 7)),
        (control_batch(25, commit=False, producer_id=4000), EndTransactionMarker(4000, 25, True, 7)),
        (control_batch(25, commit=True, producer_id=4000), EndTransactionMarker(4000, 25, False, 7)),
        (EMPTIED, None),
        (LEADER_CHANGE, None),
    ],
    ids=["a broker's abort", "abort", "commit", "an emptied batch", "no marker"],
)
def test_a_marker_says_how_a_transaction_ended(log: bytes, said: EndTransactionMarker | None) -> None:
    assert marker_of(log) == said


@pytest.mark.parametrize("body", [*(MARKER[61 : 61 + kept] for kept in range(16)), b"\xff" * 7])
def test_a_marker_that_is_cut_short_is_corrupt(body: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        marker_of(MARKER[:8] + (49 + len(body)).to_bytes(4, "big") + MARKER[12:61] + body)
