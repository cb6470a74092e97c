"""Rebuilds the indexes of a segment whose `.indexes` object is lost, from its log and the neighbouring segments.

* The segment before it has the state at its end: leader epochs, producers, open transactions. Without that segment, the
  indexes lack everything that began earlier. Readers do not depend on it: the log itself has the data that they need.
* The segment after it shows which of the open transactions aborted. Without that segment, the indexer must not guess:
  readers would receive records of aborted transactions.
* With both neighbours, the rebuilt indexes equal the lost ones byte for byte.
"""

from __future__ import annotations

from pathlib import Path

from tiers.errors import CorruptSegmentError
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import IndexesObject
from tiers.segment.producer_state import NO_OFFSET
from tiers.segment.segment_builder import BuiltSegment, Carried, SegmentBuilder


class LogIndexer:
    """Rebuilds the indexes of one segment.

    The caller passes the whole log to `append`, in pieces of whole batches, then calls `finish`, and finally `discard`.
    """

    def __init__(
        self, path: Path, segment: RemoteLogSegmentMetadata, carried: Carried, after: IndexesObject | None
    ) -> None:
        """`carried` is what the segment before this one leaves to it, or the known leader epochs alone.

        No offsets may be missing between this segment and `after`, which follows it."""
        self._segment = segment
        self._has_after = after is not None
        self._reported = [
            AbortedTransaction(one.producer_id, one.first_offset)
            for one in (() if after is None else after.indexes.aborted_transactions)
            if one.first_offset <= segment.end_offset
        ]
        self._builder = SegmentBuilder(path, segment.start_offset, carried)

    def append(self, batches: bytes) -> None:
        """Appends whole batches. Blocks on the disk.

        Raises `CorruptBatchError`, `LogDivergedError`, `SegmentOverflowError`, `UnknownEpochStartError`.
        """
        self._builder.append(batches, self._reported, self._segment.segment_leader_epochs)

    def finish(self) -> BuiltSegment:
        """Returns the segment with its rebuilt indexes.

        Raises `CorruptSegmentError` when the log is not the segment's, or when a transaction is open at the end and the
        segment after it is missing.
        """
        segment, built = self._segment, self._builder.finish()
        found = built.end_offset, built.size_bytes, built.segment_leader_epochs
        wanted = segment.end_offset, segment.segment_size_bytes, segment.segment_leader_epochs
        if found != wanted:
            raise CorruptSegmentError(f"the log is not the segment's: the log has {found}, the segment has {wanted}")
        for one in () if self._has_after else Carried.behind(built.indexes).producers:
            if one.current_txn_first_offset != NO_OFFSET:
                raise CorruptSegmentError(
                    f"a transaction of producer {one.producer_id} from {one.current_txn_first_offset} on is open at its"
                    " end, and no segment follows that shows whether the transaction aborted"
                )
        return built

    def discard(self) -> None:
        self._builder.discard()
