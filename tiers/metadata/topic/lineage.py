"""`MetadataLineage` checks whether the leaders' logs continue the logs that were read of the metadata partitions.

A log that ends below the last read position was emptied, restored from an older copy, or cut by an unclean election. A
log that begins above it has deleted records unread. No answer about those records counts then. The state is the last
place that has them, so it is kept, and is not fresh until the log has the records again, or until an operator
configures another topic.

A log that lost records and has grown since looks complete by its offsets. So a position also has the leader epoch of
the last batch that was read (docs/semantics.md 6.1). A leader whose log ends that epoch earlier has *diverged*. That
never ends by itself, not even when a later leader has all records again, since owners wrote records meanwhile without
knowing the lost ones. The state keeps the divergence, and only an operator ends it, by removing that state.

The follower believes a new leader after two answers: the end of its committed log, since its first high watermarks may
lie below the end that an earlier leader committed, and the end, in its log, of the leader epoch of the last batch that
was ever read. At every sign of a loss the follower asks the leader again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tiers.broker.client import Leader
from tiers.metadata.topic.followed_partition import FollowedPartition
from tiers.metadata.topic.followed_state import FollowedState
from tiers.metadata.topic.leadership import LATEST_TIMESTAMP, MetadataLeadership
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import OffsetAndEpoch

logger = logging.getLogger(__name__)

_WHAT_TO_DO = "see `tidegate tier rebuild` and 'The metadata topic is lost' in docs/recovery.md"


class MetadataLineage:
    def __init__(self, leadership: MetadataLeadership, followed: FollowedState) -> None:
        self._leadership = leadership
        self._followed = followed

    async def ask(self, leaders: Mapping[int, Leader], timeout_ms: int) -> None:
        """Asks the leaders that are not believed yet. All partitions in `leaders` have the same leader node.

        Raises `BrokerError`."""
        await self._followed.save_divergences()
        partitions = self._followed.partitions
        new = {number: leader for number, leader in leaders.items() if partitions[number].believed != leader}
        if not new:
            return
        ends = await self._leadership.offsets(new, LATEST_TIMESTAMP, timeout_ms)
        # A partition without a leader epoch was never read.
        read = {number: at for number in ends if (at := partitions[number].furthest).leader_epoch >= 0}
        asked = {number: (new[number], at.leader_epoch) for number, at in read.items()}
        answered = await self._leadership.epoch_ends(asked, timeout_ms) if asked else {}
        for number, end in ends.items():
            if number in read:
                answer = answered.get(number)
                if answer is None or not await self.continues(partitions[number], read[number], answer, end):
                    continue
            partitions[number].believed = new[number]

    async def continues(
        self, partition: FollowedPartition, read: OffsetAndEpoch, answered: EpochEndOffset, high_watermark: int
    ) -> bool:
        """Returns whether the leader's log continues the log that was read up to `read`.

        `answered` is the end of the leader epoch of `read` in the leader's log. The log has diverged when it has
        committed another record at the offset of a missing one."""
        is_known = answered.leader_epoch >= 0
        if partition.diverged is None:
            # The epoch may be lower: compaction may leave no record of the later epochs on this replica.
            if is_known and answered.leader_epoch <= read.leader_epoch and answered.end_offset >= read.offset:
                return True
            ends_at = answered.end_offset if is_known and answered.end_offset < read.offset else read.offset - 1
            if high_watermark <= ends_at:
                _lacks_end(partition, high_watermark, read.offset)
            else:
                _diverge(partition, read, ends_at)
        _doubt(partition)
        await self._followed.save_divergences()
        return False

    def is_within(self, partition: FollowedPartition, position: int, end: int) -> bool:
        """Returns whether the log of a believed leader still reaches all records that were read, by its offsets.

        `end` (exclusive) is the offset up to which the leader has surely committed."""
        reached = max(position, partition.reached.offset)
        if partition.diverged is None and end >= reached:
            if partition.lost is not None:
                partition.lost = None
                logger.warning(
                    "a metadata partition has all records again", extra={"metadata_partition": partition.number}
                )
            return True
        _lacks_end(partition, end, reached)
        _doubt(partition)
        return False

    def out_of_range(self, partition: FollowedPartition, position: int, log_start: int, end: int) -> None:
        """Handles an OFFSET_OUT_OF_RANGE of the leader: the follower asks the leader again.

        A leader also gives this answer when it does not know the leader epoch of the position."""
        reached = max(position, partition.reached.offset)
        if position < log_start:
            _lacks(
                partition,
                f"records {position} to {log_start - 1} of metadata partition {partition.number} were deleted unread",
            )
        elif end < reached:
            _lacks_end(partition, end, reached)
        _doubt(partition)


def _diverge(partition: FollowedPartition, read: OffsetAndEpoch, ends_at: int) -> None:
    partition.diverged = (
        f"metadata partition {partition.number} was read to {read.offset} in leader epoch {read.leader_epoch}, and now"
        f" has other records from {ends_at} on, or already below: it lost records and was written to since;"
        f" the follower does not read it until an operator decides: {_WHAT_TO_DO}"
    )
    partition.lost = None
    logger.error("the remote log metadata is not followed", extra={"reason": partition.diverged})


def _lacks_end(partition: FollowedPartition, end: int, reached: int) -> None:
    _lacks(
        partition,
        f"metadata partition {partition.number} ends at {end} and was read to {reached}: the topic lost records",
    )


def _lacks(partition: FollowedPartition, reason: str) -> None:
    if partition.diverged is not None:
        return
    if partition.lost is None:
        logger.error("the remote log metadata is not followed", extra={"reason": reason})
    partition.lost = reason


def _doubt(partition: FollowedPartition) -> None:
    partition.believed = partition.fresh_at_ms = None
