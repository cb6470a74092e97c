"""Indexes of one segment that takes the place of several: what its log has, known as well as they knew it.

The offset, time and remote log index are made of the batches anew. What batches alone do not tell is taken over:

* An aborted transaction is known to the segment that holds its marker; one that is still open, to the last segment.
* Producers' state, the leader epochs since the log began, and whether that is all: the last segment's.

So the whole equals what a copier makes that got all batches into one segment. Its parts must continue each other: one
that knows less than the one before it, after a copier lost what it knew, is merged with nothing before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes_object import IndexesObject
from tiers.segment.producer_snapshot import decode_producer_snapshot
from tiers.segment.segment_builder import BuiltSegment
from tiers.segment.segment_index import AbortedTransactionRange
from tiers.segment.transaction_index import (
    MARKER_NOT_COPIED,
    AbortedTxn,
    decode_transaction_index,
    encode_transaction_index,
)


def why_not_continued(earlier: IndexesObject, later: IndexesObject) -> str | None:
    """What keeps `later` from being merged with the segment before it; None: nothing does."""
    if later.metadata.start_offset != earlier.metadata.end_offset + 1:
        return f"offsets from {earlier.metadata.end_offset + 1} on are missing or come twice"
    known = earlier.indexes.leader_epochs
    if later.indexes.leader_epochs[: len(known)] != known:
        return f"the segment at {later.metadata.start_offset} does not know the leader epochs before it"
    if later.indexes.history_from != earlier.indexes.history_from:
        return f"the segment at {later.metadata.start_offset} does not know the transactions before it"
    return None


def epochs_before(first: IndexesObject) -> tuple[LeaderEpochEntry, ...]:
    """What a builder of the merged segment is given for the leader epochs before it."""
    start = first.metadata.start_offset
    return tuple(entry for entry in first.indexes.leader_epochs if entry.start_offset < start)


def with_merged_indexes(built: BuiltSegment, parts: Sequence[IndexesObject]) -> BuiltSegment:
    """`built` has the batches of all `parts`, in order, and has seen no report of aborted transactions.

    Raises `CorruptSegmentError` when it is not what the parts say."""
    last = parts[-1].indexes
    described = parts[0].metadata.start_offset, parts[-1].metadata.end_offset, sum(_size_bytes(each) for each in parts)
    if described != (built.start_offset, built.end_offset, built.size_bytes):
        raise CorruptSegmentError(
            f"the segments have offsets {described[0]} to {described[1]} in {described[2]} bytes, their logs "
            f"{built.start_offset} to {built.end_offset} in {built.size_bytes}"
        )
    if built.leader_epochs != last.leader_epochs:
        raise CorruptSegmentError(f"the log has leader epochs {built.leader_epochs}, its indexes {last.leader_epochs}")
    ranges = _ranges(parts)
    return replace(
        built,
        txn_index_empty=not ranges,
        producers=decode_producer_snapshot(last.producer_snapshot),
        indexes=replace(
            built.indexes,
            aborted_transactions=ranges,
            transaction_index=encode_transaction_index(_transaction_index(parts, built.start_offset)),
            producer_snapshot=bytes(last.producer_snapshot),
            history_from=last.history_from,
        ),
    )


def _size_bytes(part: IndexesObject) -> int:
    return part.metadata.segment_size_bytes


def _ranges(parts: Sequence[IndexesObject]) -> tuple[AbortedTransactionRange, ...]:
    ended = (
        each for part in parts for each in part.indexes.aborted_transactions if each.last_offset != MARKER_NOT_COPIED
    )
    still_open = (each for each in parts[-1].indexes.aborted_transactions if each.last_offset == MARKER_NOT_COPIED)
    return tuple(sorted((*ended, *still_open), key=lambda each: (each.first_offset, each.producer_id)))


def _transaction_index(parts: Sequence[IndexesObject], start: int) -> list[AbortedTxn]:
    """Where older transactions may be open unseen, no last stable offset above the segment's start is claimed."""
    entries = [entry for part in parts for entry in decode_transaction_index(part.indexes.transaction_index)]
    if parts[0].indexes.history_from == 0:
        return entries
    return [entry._replace(last_stable_offset=min(entry.last_stable_offset, start)) for entry in entries]
