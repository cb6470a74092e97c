"""`MetadataLineage` checks whether the leaders' logs continue the logs that were read of the metadata partitions.

A log that ends below the last read position has lost records: it was emptied, restored from an older copy, or cut by an
unclean election. A log that begins above the position has deleted records that the follower never read. In both cases
no answer about those records may count as the truth. The state that was built from the lost records is the last place
that has them, so it is kept. The partition is not fresh until the log has the records again, or until an operator
configures another topic.

A log that lost records and has grown since looks complete by its offsets. So a position also has the leader epoch of
the last batch that was read (docs/semantics.md 6.1). A leader whose log ends that epoch earlier has other records
there: its log has *diverged*. A divergence never ends by itself, not even when a later leader has all records again,
since owners wrote records meanwhile without knowing the lost ones. The state keeps the divergence. Only an operator
ends it, by removing that state.

The follower believes a new leader after two answers. The first is the end of its committed log, since its first high
watermarks may lie below the end that an earlier leader committed (`MetadataLeadership`). The second is the end, in its
log, of the leader epoch of the last batch that was ever read. Every sign of a loss makes the follower ask the leader
again, since a log that lacks records may grow past their offsets.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import lmdb

from tiers.broker.client import Leader
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic.leadership import LATEST_TIMESTAMP, MetadataLeadership
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import OffsetAndEpoch

logger = logging.getLogger(__name__)

_WHAT_TO_DO = "see `tidegate tier rebuild` and 'The metadata topic is lost' in docs/recovery.md"


class MetadataLineage:
    """Asks the leaders of all metadata partitions, and remembers which leaders are believed.

    `in_state_thread` runs a function that writes to the state. `on_loss` is called with the number of a metadata
    partition at every sign that the partition lacks records."""

    def __init__(
        self,
        leadership: MetadataLeadership,
        state: RemoteLogMetadataStateWriter,
        partition_count: int,
        position: Callable[[int], OffsetAndEpoch],
        in_state_thread: Callable[[Callable[[], None]], Awaitable[None]],
        on_loss: Callable[[int], object],
    ) -> None:
        self._leadership = leadership
        self._state = state
        self._position = position
        self._in_state_thread = in_state_thread
        self._on_loss = on_loss
        self._believed: dict[int, Leader] = {}
        self._reached = {number: state.reached(number) for number in range(partition_count)}
        """Behind the last record that was ever read."""
        self._diverged = state.diverged()
        self._kept = set(self._diverged)
        self._lost: dict[int, str] = {}
        """Why a log lacks records that it may have again."""

    @property
    def reason(self) -> str | None:
        """Returns a text for an operator about the lost records; None when no record is known to be lost."""
        return next(iter([*self._diverged.values(), *self._lost.values()]), None)

    def divergence(self, number: int) -> str | None:
        """Returns why the follower does not read the partition until an operator decides; None when it reads it."""
        return self._diverged.get(number)

    def remember(self, number: int) -> None:
        """Remembers the position of the partition as the highest one. The caller is about to set the position back."""
        self._reached[number] = self._furthest(number)

    def _furthest(self, number: int) -> OffsetAndEpoch:
        return max(self._position(number), self._reached[number])

    def is_believed(self, number: int, leader: Leader) -> bool:
        return self._believed.get(number) == leader

    async def ask(self, leaders: Mapping[int, Leader], timeout_ms: int) -> None:
        """Asks the leaders that are not believed yet. All partitions in `leaders` have the same leader node.

        Raises `BrokerError`."""
        await self._keep_divergences()
        new = {number: leader for number, leader in leaders.items() if not self.is_believed(number, leader)}
        if not new:
            return
        ends = await self._leadership.offsets(new, LATEST_TIMESTAMP, timeout_ms)
        # A partition without a leader epoch was never read.
        read = {number: at for number in ends if (at := self._furthest(number)).leader_epoch >= 0}
        asked = {number: (new[number], at.leader_epoch) for number, at in read.items()}
        answered = await self._leadership.epoch_ends(asked, timeout_ms) if asked else {}
        for number, end in ends.items():
            if number in read:
                answer = answered.get(number)
                if answer is None or not await self.continues(number, read[number], answer, end):
                    continue
            self._believed[number] = new[number]

    async def continues(self, number: int, read: OffsetAndEpoch, answered: EpochEndOffset, high_watermark: int) -> bool:
        """Returns whether the leader's log continues the log that was read up to `read`.

        `answered` is the end of the leader epoch of `read` in the leader's log. The log has diverged when it has
        committed another record at the offset of a missing one."""
        is_known = answered.leader_epoch >= 0
        if number not in self._diverged:
            # The epoch may be lower: compaction may leave no record of the later epochs on this replica.
            if is_known and answered.leader_epoch <= read.leader_epoch and answered.end_offset >= read.offset:
                return True
            ends_at = answered.end_offset if is_known and answered.end_offset < read.offset else read.offset - 1
            if high_watermark <= ends_at:
                self._lacks_end(number, high_watermark, read.offset)
            else:
                self._diverge(number, read, ends_at)
        self._doubt(number)
        await self._keep_divergences()
        return False

    def _diverge(self, number: int, read: OffsetAndEpoch, ends_at: int) -> None:
        reason = (
            f"metadata partition {number} was read to {read.offset} in leader epoch {read.leader_epoch}, and now has"
            f" other records from {ends_at} on, or already below: it lost records and was written to since;"
            f" the follower does not read it until an operator decides: {_WHAT_TO_DO}"
        )
        logger.error("the remote log metadata is not followed", extra={"reason": reason})
        self._diverged[number] = reason
        self._lost.pop(number, None)

    def is_within(self, number: int, position: int, end: int) -> bool:
        """Returns whether the log of a believed leader still reaches all records that were read, by its offsets.

        `end` (exclusive) is the offset up to which the leader has surely committed."""
        reached = max(position, self._reached[number].offset)
        if number not in self._diverged and end >= reached:
            if self._lost.pop(number, None) is not None:
                logger.warning("a metadata partition has all records again", extra={"metadata_partition": number})
            return True
        self._lacks_end(number, end, reached)
        self._doubt(number)
        return False

    def out_of_range(self, number: int, position: int, log_start: int, end: int) -> None:
        """Handles an OFFSET_OUT_OF_RANGE of the leader: the follower asks the leader again.

        A leader also gives this answer when it does not know the leader epoch of the position."""
        reached = max(position, self._reached[number].offset)
        if position < log_start:
            self._lacks(
                number, f"records {position} to {log_start - 1} of metadata partition {number} were deleted unread"
            )
        elif end < reached:
            self._lacks_end(number, end, reached)
        self._doubt(number)

    def _lacks_end(self, number: int, end: int, reached: int) -> None:
        self._lacks(
            number, f"metadata partition {number} ends at {end} and was read to {reached}: the topic lost records"
        )

    def _lacks(self, number: int, reason: str) -> None:
        if number in self._diverged:
            return
        if number not in self._lost:
            logger.error("the remote log metadata is not followed", extra={"reason": reason})
        self._lost[number] = reason

    def _doubt(self, number: int) -> None:
        self._believed.pop(number, None)
        self._on_loss(number)

    async def _keep_divergences(self) -> None:
        for number in self._diverged.keys() - self._kept:
            reason = self._diverged[number]

            def keep(number: int = number, reason: str = reason) -> None:
                self._state.mark_diverged(number, reason)

            try:
                await self._in_state_thread(keep)
            except (lmdb.Error, OSError) as error:
                # This process remembers the divergence and tries again. A restarted process has to find it again.
                logger.warning("the divergence of a metadata partition cannot be saved", extra={"error": str(error)})
            else:
                self._kept.add(number)
