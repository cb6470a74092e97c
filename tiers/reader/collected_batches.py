"""Collects the batches of one remote read: whole batches from an offset on, within a byte budget, up to a CUT."""

from __future__ import annotations

from protocol.records.record_batch import cut_at_batches, iterate_batches, skip_to_offset
from tiers.errors import OffsetGapError
from tiers.model.log_source import AbortedTransaction
from tiers.segment.indexes.segment_index import AbortedTransactionRange, overlapping

PINNED_RATIO = 16
"""A view may keep a buffer of at most this many times its own size in memory; a smaller view is copied.

An answer of 1 MiB has parts of two chunks as a rule, and a GET has up to eight chunks."""


def end_of_valid(view: memoryview, valid_end_offset: int) -> int:
    """Returns the end of the batches whose last offset is at most `valid_end_offset`.

    A CUT lies between two batches, so no batch crosses it.
    """
    end = 0
    for batch in iterate_batches(view):
        if batch.last_offset > valid_end_offset:
            break
        end = batch.end
    return end


class CollectedBatches:
    """The batches of a read, from `offset` on and within `max_bytes`.

    With `min_one_message`, the first batch is taken whatever its size."""

    def __init__(self, offset: int, max_bytes: int, min_one_message: bool) -> None:
        self.records: list[memoryview] = []
        self.remaining_bytes = max_bytes
        self.size_bytes = 0
        self.first_offset = offset
        self.next_offset = offset
        self.is_full = False
        self.aborted: list[AbortedTransactionRange] = []
        self._min_one_message = min_one_message

    def take(self, view: memoryview, last_offset: int, valid_end_offset: int) -> None:
        """Takes batches of the next chunk, whose inclusive end is `last_offset`. Skips those above `valid_end_offset`.

        Takes none if the log has no records from the offset to `valid_end_offset`. Raises `OffsetGapError` when the
        first batch may be served only in part.
        """
        start = 0 if self.records else skip_to_offset(view, self.next_offset)
        end = len(view)
        if last_offset > valid_end_offset:
            end = end_of_valid(view, valid_end_offset)
            last_offset = valid_end_offset
            if end <= start and not self.records:
                if next(iterate_batches(view, start)).base_offset > valid_end_offset:
                    return
                raise OffsetGapError(f"the remote log was cut at {valid_end_offset}, inside a batch")
        if end - start > self.remaining_bytes:
            end = min(
                end, cut_at_batches(view, self.remaining_bytes, self._min_one_message and not self.records, start)
            )
            self.is_full = True
        if end > start:
            if not self.records:
                self.first_offset = next(iterate_batches(view, start, end)).base_offset
            taken = view[start:end]
            if len(taken) * PINNED_RATIO < memoryview(view.obj).nbytes:
                taken = memoryview(bytes(taken))
            self.records.append(taken)
            self.size_bytes += len(taken)
            self.remaining_bytes -= len(taken)
            self.next_offset = last_offset + 1

    def aborted_transactions(self) -> tuple[AbortedTransaction, ...]:
        """Returns the aborted transactions that Fetch must emit with the taken batches (docs/semantics.md 7)."""
        ranges = overlapping(self.aborted, self.first_offset, self.next_offset - 1)
        return tuple(AbortedTransaction(one.producer_id, one.first_offset) for one in ranges)
