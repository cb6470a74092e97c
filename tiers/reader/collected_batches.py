"""One answer of the remote tier as it grows: whole batches from an offset on, within a budget, up to a clamp."""

from __future__ import annotations

from bisect import bisect_right

from protocol.records.record_batch import cut_at_batches, iterate_batches, skip_to_offset
from tiers.errors import OffsetGapError
from tiers.log.log_source import AbortedTransaction
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.segment_index import AbortedTransactionRange, SegmentIndex
from tiers.segment.transaction_index import overlapping

PINNED_RATIO = 8
"""How much of a download an answer may keep in memory, in multiples of what it uses."""


def end_of_valid(view: memoryview, valid_end_offset: int) -> int:
    """Where the batches end that lie wholly at or below the offset; a clamp lies between two batches."""
    end = 0
    for batch in iterate_batches(view):
        if batch.last_offset > valid_end_offset:
            break
        end = batch.end
    return end


def end_chunk_number(index: SegmentIndex, segment: RemoteLogSegmentMetadata) -> int:
    """The number behind the last chunk that has anything of what may be served."""
    chunks = index.chunks()
    if segment.clamped_to is None:
        return len(chunks)
    return bisect_right(chunks, segment.valid_end_offset, key=lambda chunk: chunk.first_offset)


class CollectedBatches:
    """The answer as it grows: batches from `offset` on, within the budget."""

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
        """`view` is the next chunk; `last_offset` its inclusive end. What is above `valid_end_offset` is left out."""
        start = 0 if self.records else skip_to_offset(view, self.next_offset)
        end = len(view)
        if last_offset > valid_end_offset:
            end = end_of_valid(view, valid_end_offset)
            last_offset = valid_end_offset
            if end <= start and not self.records:
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
        """What Fetch must emit for what was taken (semantics 7)."""
        ranges = overlapping(self.aborted, self.first_offset, self.next_offset - 1)
        return tuple(AbortedTransaction(one.producer_id, one.first_offset) for one in ranges)
