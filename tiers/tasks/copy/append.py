"""Appends records that were read from the leader, and asks it for the leader epochs that begin in holes.

See docs/semantics.md 6.1, 6.5.
"""

from __future__ import annotations

from functools import partial

from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction, LogSource
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.leader_epochs import EpochHole, UnknownEpochStartError
from tiers.segment.segment_builder import SegmentBuilder
from tiers.tasks.copy.spool import Spool


async def append_records(
    builder: SegmentBuilder,
    records: bytes,
    aborted_transactions: tuple[AbortedTransaction, ...],
    spool: Spool,
    source: LogSource,
    partition: TopicIdPartition,
    timeout_ms: int,
) -> None:
    """Appends records of `source`. Raises the errors of `SegmentBuilder.append` except `UnknownEpochStartError`,
    `SpoolError`, and `BrokerError`."""
    named: tuple[LeaderEpochEntry, ...] = ()
    while True:
        try:
            return await spool.run(partial(builder.append, records, aborted_transactions, named))
        except UnknownEpochStartError as error:
            hole = error.hole
        # The answer has the epoch that the builder lacks, so each step names one hole more.
        named += await epochs_in_hole(source, partition, hole, timeout_ms)


async def epochs_in_hole(
    source: LogSource, partition: TopicIdPartition, hole: EpochHole, timeout_ms: int
) -> tuple[LeaderEpochEntry, ...]:
    """Returns the leader epochs from after `hole.known_epoch` to `hole.leader_epoch` where the leader lets them begin.

    The first start may be too high, at `next_offset` at the lowest. If the leader does not know where the batch's epoch
    begins, the function lets it begin at the batch. Raises `BrokerError`."""
    entries: list[LeaderEpochEntry] = []
    epoch, bound = hole.leader_epoch, hole.first_offset
    while epoch > hole.known_epoch:
        if epoch == 0:
            entries.append(LeaderEpochEntry(0, hole.next_offset))
            break
        answer = await source.end_offset_for_epoch(partition, epoch - 1, timeout_ms)
        is_known = 0 <= answer.leader_epoch < epoch
        start = min(max(answer.end_offset, hole.next_offset), bound) if is_known else bound
        if entries and start == bound:
            break  # the leader has forgotten the epochs below (docs/semantics.md 6.1, third row)
        entries.append(LeaderEpochEntry(epoch, start))
        if not is_known or start == hole.next_offset:
            break
        epoch, bound = answer.leader_epoch, start
    return tuple(reversed(entries))
