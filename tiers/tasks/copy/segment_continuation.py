"""The state that a segment takes over from the one before it: leader epochs, open transactions and producers.

After a restart, this state is read from the last segment's stored indexes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from tiers.errors import CorruptSegmentError, RemoteResourceNotFoundError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import SegmentIndexes, decode_indexes_object
from tiers.segment.producer_state import NO_OFFSET, ProducerStateEntry, decode_producer_snapshot
from tiers.segment.transactions import OpenTransactions, open_at_the_end
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SegmentContinuation:
    """The state after the segment that ends directly before `next_offset`."""

    next_offset: int
    leader_epochs: tuple[LeaderEpochEntry, ...] = ()
    open_transactions: OpenTransactions | None = None
    producers: tuple[ProducerStateEntry, ...] = ()


async def continuation_at(services: TaskServices, partition: TopicIdPartition, start: int) -> SegmentContinuation:
    """Returns the state that the segment beginning at `start` takes over, from the indexes of the segment before it.

    That segment is stored, or its copy has not ended, and the spool has it. If the stored indexes are unreadable, the
    metadata has the leader epochs. The state of producers and transactions is unknown where a CUT cuts a segment, and
    after a gap. Leader epochs are kept over a gap, so the indexes of every segment have those of the whole log before.
    """
    metadata, end = services.state, start
    for gap in reversed(metadata.gaps(partition)):
        if gap.next_offset == end:
            end = gap.first_offset
    for kept in services.spool.kept_in(partition):
        known = metadata.remote_log_segment_metadata_by_id(kept.metadata.segment_id) or kept.metadata
        if known.valid_end_offset == end - 1:
            raw = await services.spool.run(kept.indexes.read_bytes)
            return _continuation(start, end, known, decode_indexes_object(raw, kept.metadata).indexes)
    previous = metadata.remote_log_segment_metadata(partition, end - 1)
    if previous is None:
        return SegmentContinuation(start)
    try:
        stored = decode_indexes_object(await services.storage.fetch_indexes(previous), previous)
        return _continuation(start, end, previous, stored.indexes)
    except (RemoteResourceNotFoundError, CorruptSegmentError) as error:
        # The metadata lacks the epochs of expired segments. But a lost object must not stop the copying forever.
        logger.error(
            "the newest segment's indexes cannot be read",
            extra={"partition": str(partition), "segment": str(previous.segment_id.id), "error": str(error)},
        )
        return SegmentContinuation(start, _known_epochs(metadata.list_remote_log_segments(partition), end))


def _continuation(
    start: int, end: int, previous: RemoteLogSegmentMetadata, indexes: SegmentIndexes
) -> SegmentContinuation:
    """Returns the state after the segment with these indexes, whose valid records end directly before `end`."""
    if previous.end_offset != start - 1:
        # A segment that a CUT cuts also has epochs of the records that were cut off.
        epochs = tuple(entry for entry in indexes.leader_epochs if entry.start_offset < end)
        return SegmentContinuation(start, epochs)
    producers = decode_producer_snapshot(indexes.producer_snapshot)
    return SegmentContinuation(start, indexes.leader_epochs, _open_transactions(producers, indexes), producers)


def _open_transactions(producers: Iterable[ProducerStateEntry], indexes: SegmentIndexes) -> OpenTransactions:
    """Returns the transactions that are open. The leader reports again which of them abort."""
    return OpenTransactions(
        ongoing=tuple(
            AbortedTransaction(one.producer_id, one.current_txn_first_offset)
            for one in producers
            if one.current_txn_first_offset != NO_OFFSET
        ),
        history_from=indexes.history_from,
        listed=open_at_the_end(indexes.aborted_transactions),
    )


def _known_epochs(segments: Iterable[RemoteLogSegmentMetadata], end: int) -> tuple[LeaderEpochEntry, ...]:
    epochs: list[LeaderEpochEntry] = []
    for segment in segments:
        if segment.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            epochs += [
                entry
                for entry in segment.segment_leader_epochs
                if entry.start_offset <= segment.valid_end_offset
                and entry.start_offset < end
                and (not epochs or entry.epoch > epochs[-1].epoch)
            ]
    return tuple(epochs)
