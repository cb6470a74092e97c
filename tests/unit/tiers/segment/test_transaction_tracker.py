from __future__ import annotations

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import build_batch, control_batch, record
from tiers.model.log_source import AbortedTransaction
from tiers.segment.control_record import end_transaction_marker
from tiers.segment.indexes.segment_index import AbortedTransactionRange
from tiers.segment.indexes.transaction_index import MARKER_NOT_COPIED, AbortedTxn
from tiers.segment.transaction_tracker import OpenTransactions, TransactionTracker

A, B = 4000, 4001


def data(pid: int, first: int, last: int) -> bytes:
    return build_batch(first, [record(o) for o in range(first, last + 1)], producer_id=pid, transactional=True)


def abort(pid: int, offset: int) -> bytes:
    return control_batch(offset, commit=False, producer_id=pid)


def commit(pid: int, offset: int) -> bytes:
    return control_batch(offset, commit=True, producer_id=pid)


def feed(tracker: TransactionTracker, *batches: bytes) -> TransactionTracker:
    log = b"".join(batches)
    for batch in iterate_batches(log):
        if not batch.is_control:
            tracker.on_data_batch(batch)
        elif marker := end_transaction_marker(log, batch):
            tracker.on_marker(marker)
    return tracker


def test_a_transaction_within_the_segment() -> None:
    tracker = TransactionTracker(0, None)
    tracker.on_report([AbortedTransaction(A, 10)])
    feed(tracker, data(A, 10, 24), abort(A, 25))
    assert tracker.ranges(99) == (AbortedTransactionRange(A, 10, 25),)
    assert tracker.transaction_index() == [AbortedTxn(A, 10, 25, 26)]
    assert tracker.open_transactions() == OpenTransactions(history_from=0)


def test_the_marker_of_a_later_segment_closes_what_was_carried() -> None:
    first = TransactionTracker(0, None)
    first.on_report([AbortedTransaction(A, 10)])
    feed(first, data(A, 10, 29))
    assert first.ranges(29) == (AbortedTransactionRange(A, 10, MARKER_NOT_COPIED),)

    second = TransactionTracker(30, first.open_transactions())
    second.on_report([AbortedTransaction(A, 10)])
    feed(second, data(B, 30, 49), abort(A, 50))
    assert second.ranges(50) == (AbortedTransactionRange(A, 10, 50),)
    # B has been open since 30, so the last stable offset stays there.
    assert second.transaction_index() == [AbortedTxn(A, 10, 50, 30)]
    assert second.open_transactions().ongoing == (AbortedTransaction(B, 30),)


def test_a_marker_closes_one_transaction_and_not_the_producers_next() -> None:
    tracker = TransactionTracker(0, None)
    tracker.on_report([AbortedTransaction(A, 10), AbortedTransaction(A, 30)])
    feed(tracker, data(A, 10, 19), abort(A, 20), data(A, 30, 39))
    assert tracker.ranges(39) == (
        AbortedTransactionRange(A, 10, 20),
        AbortedTransactionRange(A, 30, MARKER_NOT_COPIED),
    )


def test_committed_data_between_two_aborted_transactions_is_not_covered() -> None:
    tracker = TransactionTracker(0, None)
    tracker.on_report([AbortedTransaction(A, 0), AbortedTransaction(A, 20)])
    feed(tracker, data(A, 0, 4), abort(A, 5), data(A, 6, 9), commit(A, 10), data(A, 20, 24), abort(A, 25))
    assert tracker.ranges(25) == (AbortedTransactionRange(A, 0, 5), AbortedTransactionRange(A, 20, 25))


def test_a_report_that_is_repeated_after_the_marker_opens_nothing() -> None:
    tracker = TransactionTracker(0, None)
    tracker.on_report([AbortedTransaction(A, 10)])
    feed(tracker, data(A, 10, 24), abort(A, 25))
    tracker.on_report([AbortedTransaction(A, 10)])
    assert tracker.ranges(99) == (AbortedTransactionRange(A, 10, 25),)


def test_one_report_for_two_segments_opens_nothing_again() -> None:
    report = [AbortedTransaction(A, 10), AbortedTransaction(B, 12)]
    first = TransactionTracker(0, None)
    first.on_report(report)
    feed(first, data(A, 10, 11), data(B, 12, 14), abort(A, 15))
    second = TransactionTracker(16, first.open_transactions())
    second.on_report(report)
    feed(second, data(A, 16, 19))
    assert second.ranges(19) == (AbortedTransactionRange(B, 12, MARKER_NOT_COPIED),)


def test_a_report_of_what_began_before_the_copier_did_is_believed() -> None:
    first = feed(TransactionTracker(100, None), data(A, 100, 109))
    second = TransactionTracker(110, first.open_transactions())
    second.on_report([AbortedTransaction(A, 90), AbortedTransaction(B, 95)])
    assert [one.first_offset for one in second.ranges(119)] == [90, 95]


def test_a_stale_carried_transaction_poisons_nothing() -> None:
    """Its marker lies before this segment: neither a later abort nor a commit of the producer may stretch over it."""
    stale = OpenTransactions(aborted=(AbortedTransaction(A, 3), AbortedTransaction(B, 4)))
    tracker = TransactionTracker(100, stale)
    tracker.on_report([AbortedTransaction(A, 110)])
    feed(tracker, data(A, 100, 101), commit(B, 105), data(A, 110, 119), abort(A, 120))
    assert tracker.ranges(120) == (AbortedTransactionRange(A, 110, 120),)
    assert tracker.open_transactions().aborted == ()


def test_a_transaction_beyond_the_segment_is_carried_but_not_listed() -> None:
    tracker = TransactionTracker(0, None)
    tracker.on_report([AbortedTransaction(A, 500)])
    assert tracker.ranges(99) == ()
    assert tracker.open_transactions().aborted == (AbortedTransaction(A, 500),)


def test_an_unreported_abort_counts() -> None:
    tracker = feed(TransactionTracker(0, None), data(A, 10, 19), abort(A, 20))
    assert tracker.ranges(20) == (AbortedTransactionRange(A, 10, 20),)


def test_markers_of_transactions_without_data_leave_no_trace() -> None:
    tracker = feed(TransactionTracker(0, None), abort(A, 0), commit(B, 1), abort(A, 2))
    assert tracker.ranges(2) == ()
    assert tracker.transaction_index() == []


def test_a_copier_that_began_midway_claims_no_later_last_stable_offset() -> None:
    tracker = TransactionTracker(100, None)
    tracker.on_report([AbortedTransaction(A, 90)])
    feed(tracker, abort(A, 120))
    assert tracker.transaction_index() == [AbortedTxn(A, 90, 120, 100)]
    assert tracker.open_transactions().history_from == 100
