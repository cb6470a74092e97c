"""Indexes of a segment whose `.indexes` object is lost, made of its log, as far as that and its neighbours tell.

* The segment before tells what was known at its end: leader epochs, producers, open transactions. Without it, what
  began before the segment is not known: where that matters to readers the log itself tells it.
* Which transactions that are open at the end abort, the segment after tells. Without it they must not be guessed:
  readers would be given records of aborted transactions.
* With both, the indexes are those that were lost, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tiers.errors import CorruptSegmentError
from tiers.log.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.segment.indexes_object import IndexesObject
from tiers.segment.producer_snapshot import NO_OFFSET, decode_producer_snapshot
from tiers.segment.segment_builder import BuiltSegment, SegmentBuilder
from tiers.segment.transaction_tracker import OpenTransactions


class LogIndexer:
    """Give it all of the log by `append`, in pieces of whole batches, then ask for `finish`; at last `discard`."""

    def __init__(
        self,
        path: Path,
        segment: RemoteLogSegmentMetadata,
        before: IndexesObject | None,
        after: IndexesObject | None,
        leader_epochs: Sequence[LeaderEpochEntry] = (),
    ) -> None:
        """`before` and `after` must be neighbours without a gap. `leader_epochs`: known without `before`."""
        self._segment = segment
        self._after = after
        start = segment.start_offset
        if before is None:
            carried = OpenTransactions(history_from=start) if start else None
            self._builder = SegmentBuilder(path, start, lambda: 0, tuple(leader_epochs), carried)
            return
        producers = decode_producer_snapshot(before.indexes.producer_snapshot)
        ongoing = tuple(
            AbortedTransaction(one.producer_id, one.current_txn_first_offset)
            for one in producers
            if one.current_txn_first_offset != NO_OFFSET
        )
        known = OpenTransactions(ongoing=ongoing, history_from=before.indexes.history_from)
        epochs = tuple(entry for entry in before.indexes.leader_epochs if entry.start_offset < start)
        self._builder = SegmentBuilder(path, start, lambda: 0, epochs, known, producers)

    def append(self, batches: bytes) -> None:
        """Blocks on the disk. Raises `CorruptBatchError`, `LogDivergedError`, `SegmentOverflowError`."""
        self._builder.append(batches, list(self._reported()))

    def _reported(self) -> Iterable[AbortedTransaction]:
        """What the leader said of transactions that the segment after saw end, or still open."""
        if self._after is None:
            return
        for one in self._after.indexes.aborted_transactions:
            if one.first_offset <= self._segment.end_offset:
                yield AbortedTransaction(one.producer_id, one.first_offset)

    def finish(self) -> BuiltSegment:
        """Raises `CorruptSegmentError` when the log is not that of the segment, or does not tell enough."""
        segment, built = self._segment, self._builder.finish()
        found = built.end_offset, built.size_bytes, built.segment_leader_epochs
        wanted = segment.end_offset, segment.segment_size_bytes, segment.segment_leader_epochs
        if found != wanted:
            raise CorruptSegmentError(f"the log is not the segment's: it has {found}, the segment {wanted}")
        if self._after is None and built.open_transactions.ongoing:
            first = built.open_transactions.ongoing[0]
            raise CorruptSegmentError(
                f"a transaction of producer {first.producer_id} from {first.first_offset} on is open at its end, "
                "and there is no segment after it to tell whether it aborted"
            )
        return built

    def discard(self) -> None:
        self._builder.discard()
