from __future__ import annotations

from collections.abc import Sequence

import pytest

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import build_batch, control_batch, record
from tiers.model.log_source import AbortedTransaction
from tiers.segment.indexes.segment_index import AbortedTransactionRange
from tiers.segment.transactions import (
    MARKER_NOT_COPIED,
    AbortedTxn,
    EndTransactionMarker,
    TransactionTracker,
    end_transaction_marker,
)

A, B = 4000, 4001
Transactions = Sequence[tuple[int, int]]


def data(pid: int, first: int, last: int) -> bytes:
    return build_batch(first, [record(o) for o in range(first, last + 1)], producer_id=pid, transactional=True)


def abort(pid: int, offset: int) -> bytes:
    return control_batch(offset, commit=False, producer_id=pid)


def commit(pid: int, offset: int) -> bytes:
    return control_batch(offset, commit=True, producer_id=pid)


def fed(
    tracker: TransactionTracker, *batches: bytes, report: Transactions = (), late_report: Transactions = ()
) -> TransactionTracker:
    tracker.on_report([AbortedTransaction(*one) for one in report])
    log = b"".join(batches)
    for batch in iterate_batches(log):
        if not batch.is_control:
            tracker.on_data_batch(batch)
        elif marker := end_transaction_marker(log, batch):
            tracker.on_marker(marker)
    tracker.on_report([AbortedTransaction(*one) for one in late_report])
    return tracker


@pytest.mark.parametrize(
    ("began_at", "report", "batches", "late_report", "ranges", "last_stable_offset"),
    [
        (0, [(A, 10)], [data(A, 10, 24), abort(A, 25)], [(A, 10)], [(A, 10, 25)], 26),
        (0, [(A, 500)], [], [], [], None),
        (0, [], [abort(A, 0), commit(B, 1), abort(A, 2)], [], [], None),
        (0, [(A, 5), (A, 30)], [commit(A, 20)], [], [(A, 30, MARKER_NOT_COPIED)], None),
        (100, [(A, 90)], [abort(A, 120)], [], [(A, 90, 120)], 100),
    ],
    ids=[
        "reported again after its marker",
        "reported, and beyond the segment",
        "markers without data",
        "committed, whatever was reported",
        "a copier that began midway",
    ],
)
def test_reports_are_believed_as_far_as_the_markers_agree(
    began_at: int,
    report: Transactions,
    batches: list[bytes],
    late_report: Transactions,
    ranges: list[tuple[int, int, int]],
    last_stable_offset: int | None,
) -> None:
    tracker = fed(TransactionTracker(began_at, {}, (), began_at), *batches, report=report, late_report=late_report)
    assert tracker.ranges(199) == tuple(AbortedTransactionRange(*one) for one in ranges)
    index = [] if last_stable_offset is None else [AbortedTxn(*ranges[0], last_stable_offset)]
    assert tracker.transaction_index() == index


@pytest.mark.parametrize(
    ("history_from", "listed", "opened"),
    [
        (0, [], [12]),  # A's transaction ended in the segment before, which got the same report
        (0, [(A, 10)], [10, 12]),  # compaction removed its first record, and it goes on
        (11, [], [10, 12]),  # the copier has not seen its begin
    ],
)
def test_a_report_opens_nothing_that_ended_before(history_from: int, listed: Transactions, opened: list[int]) -> None:
    before = [AbortedTransaction(*one) for one in listed]
    tracker = TransactionTracker(16, {B: 12}, before, history_from)
    fed(tracker, data(A, 16, 19), report=[(A, 10), (B, 12)])
    assert [one.first_offset for one in tracker.ranges(19)] == opened


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
