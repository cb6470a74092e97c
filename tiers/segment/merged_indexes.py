"""Makes the indexes of one segment that replaces several consecutive segments.

A builder makes the offset, time and remote log index from the batches again. This module takes over the data that the
batches alone do not have:

* The segment with a transaction's ABORT marker knows the aborted transaction. The last segment knows those that are
  still open.
* The last segment has the state of the producers, the leader epochs since the log began, and `history_from`.

So the merged segment equals the one that a copier makes from all these batches. The parts must continue each other: if
a copier lost its state, its next segment knows less than the one before it, and the two are not merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiers.errors import CorruptSegmentError
from tiers.segment.indexes.indexes_object import IndexesObject
from tiers.segment.indexes.segment_index import AbortedTransactionRange
from tiers.segment.segment_builder import BuiltSegment
from tiers.segment.transactions import (
    MARKER_NOT_COPIED,
    AbortedTxn,
    decode_transaction_index,
    encode_transaction_index,
)


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
