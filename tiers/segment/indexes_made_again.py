"""Makes the indexes of a segment again: of a log whose `.indexes` object is lost, and of consecutive segments as one.

`LogIndexer` needs the neighbouring segments:

* The segment before has the state at its end: leader epochs, producers, open transactions. Without that segment, the
  indexes lack everything that began earlier. Readers do not depend on it: the log itself has the data that they need.
* The segment after shows which of the open transactions aborted. Without that segment, the indexer must not guess:
  readers would receive records of aborted transactions.
* With both neighbours, the indexes equal the lost ones byte for byte.

`with_merged_indexes` adds the data that the batches of the parts alone do not have:

* The segment with a transaction's ABORT marker knows the aborted transaction. The last segment knows those that are
  still open.
* The last segment has the state of the producers, the leader epochs since the log began, and `history_from`.

So the merged segment equals the one that a copier makes from all these batches. The parts must continue each other: if
a copier lost its state, its next segment knows less than the one before it, and the two are not merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tiers.errors import CorruptSegmentError
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import IndexesObject
from tiers.segment.indexes.segment_index import AbortedTransactionRange
from tiers.segment.producer_state import NO_OFFSET
from tiers.segment.segment_builder import BuiltSegment, Carried, SegmentBuilder
from tiers.segment.transactions import (
    MARKER_NOT_COPIED,
    AbortedTxn,
    decode_transaction_index,
    encode_transaction_index,
)


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


def why_not_continued(earlier: IndexesObject, later: IndexesObject) -> str | None:
    """Returns the reason why `later` cannot be merged with `earlier`, the segment before it; None if it can."""
    if later.metadata.start_offset != earlier.metadata.end_offset + 1:
        return f"offsets from {earlier.metadata.end_offset + 1} on are missing or occur twice"
    known = earlier.indexes.leader_epochs
    if later.indexes.leader_epochs[: len(known)] != known:
        return f"the segment at {later.metadata.start_offset} does not know the leader epochs before it"
    if later.indexes.history_from != earlier.indexes.history_from:
        return f"the segment at {later.metadata.start_offset} does not know the transactions before it"
    return None


def with_merged_indexes(built: BuiltSegment, parts: Sequence[IndexesObject]) -> BuiltSegment:
    """Returns `built` with the data that only the indexes of `parts` have.

    `built` must hold the batches of all `parts`, in order, appended without aborted transactions. Raises
    `CorruptSegmentError` when `built` does not match the parts."""
    last = parts[-1].indexes
    size_bytes = sum(each.metadata.segment_size_bytes for each in parts)
    described = parts[0].metadata.start_offset, parts[-1].metadata.end_offset, size_bytes
    if described != (built.start_offset, built.end_offset, built.size_bytes):
        raise CorruptSegmentError(
            f"the segments have offsets {described[0]} to {described[1]} in {described[2]} bytes, but their logs "
            f"have {built.start_offset} to {built.end_offset} in {built.size_bytes} bytes"
        )
    if built.leader_epochs != last.leader_epochs:
        raise CorruptSegmentError(
            f"the log has leader epochs {built.leader_epochs}, but its indexes have {last.leader_epochs}"
        )
    indexes = replace(
        built.indexes,
        aborted_transactions=_ranges(parts),
        transaction_index=encode_transaction_index(_transaction_index(parts, built.start_offset)),
        producer_snapshot=bytes(last.producer_snapshot),
        history_from=last.history_from,
    )
    return replace(built, indexes=indexes)


def _ranges(parts: Sequence[IndexesObject]) -> tuple[AbortedTransactionRange, ...]:
    ended = (
        each for part in parts for each in part.indexes.aborted_transactions if each.last_offset != MARKER_NOT_COPIED
    )
    still_open = (each for each in parts[-1].indexes.aborted_transactions if each.last_offset == MARKER_NOT_COPIED)
    return tuple(sorted((*ended, *still_open), key=lambda each: (each.first_offset, each.producer_id)))


def _transaction_index(parts: Sequence[IndexesObject], start: int) -> list[AbortedTxn]:
    """Returns the entries of all parts.

    If `history_from` is above 0, transactions that the indexes do not know may be open at the segment's start. Then no
    entry may claim a last stable offset above that start.
    """
    entries = [entry for part in parts for entry in decode_transaction_index(part.indexes.transaction_index)]
    if parts[0].indexes.history_from == 0:
        return entries
    return [entry._replace(last_stable_offset=min(entry.last_stable_offset, start)) for entry in entries]
