"""`MetadataLineage` checks whether the leaders' logs continue the logs that were read of the metadata partitions.

The follower believes a new leader after two answers. The first is the end of its committed log, since its first high
watermarks may lie below the end that an earlier leader committed (`MetadataLeadership`). The second is the end, in its
log, of the leader epoch of the last batch that was ever read. Every sign of a loss makes the follower ask the leader
again, since a log that lacks records may grow past their offsets. `LostRecords` judges which records are lost. The
state keeps the metadata partitions that have diverged.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import lmdb

from tiers.broker.client import Leader
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic.leadership import LATEST_TIMESTAMP, MetadataLeadership
from tiers.metadata.topic.lost_records import LostRecords
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import OffsetAndEpoch

logger = logging.getLogger(__name__)


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
        kept = state.diverged()
        self._kept = set(kept)
        self._lost = LostRecords({number: state.reached(number) for number in range(partition_count)}, kept)

    @property
    def reason(self) -> str | None:
        """Returns a text for an operator about the lost records; None when no record is known to be lost."""
        return self._lost.reason

    def divergence(self, number: int) -> str | None:
        """Returns why the follower does not read the partition until an operator decides; None when it reads it."""
        return self._lost.diverged.get(number)

    def remember(self, number: int) -> None:
        """Remembers the position of the partition as the highest one. The caller is about to set the position back."""
        self._lost.read_to(number, self._position(number))

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
        read = {number: at for number in ends if (at := self._reached(number)).leader_epoch >= 0}
        asked = {number: (new[number], at.leader_epoch) for number, at in read.items()}
        answered = await self._leadership.epoch_ends(asked, timeout_ms) if asked else {}
        for number, end in ends.items():
            if number in read:
                answer = answered.get(number)
                if answer is None or not await self.continues(number, read[number], answer, end):
                    continue
            self._believed[number] = new[number]

    def _reached(self, number: int) -> OffsetAndEpoch:
        return max(self._position(number), self._lost.reached(number))

    async def continues(self, number: int, read: OffsetAndEpoch, answered: EpochEndOffset, high_watermark: int) -> bool:
        """Returns whether the leader's log continues the log that was read up to `read`.

        `answered` is the end of the leader epoch of `read` in the leader's log."""
        is_lost = self._lost.check_lineage(number, read, answered, high_watermark)
        if is_lost:
            self._doubt(number)
            await self._keep_divergences()
        return not is_lost

    def is_within(self, number: int, position: int, log_start: int, end: int) -> bool:
        """Returns whether the log of a believed leader still reaches all records that were read, by its offsets."""
        is_lost = self._lost.check(number, position, log_start, end)
        if is_lost:
            self._doubt(number)
        return not is_lost

    def out_of_range(self, number: int, position: int, log_start: int, end: int) -> None:
        """Handles an OFFSET_OUT_OF_RANGE of the leader: the follower asks the leader again.

        A leader also gives this answer when it does not know the leader epoch of the position."""
        self._lost.check(number, position, log_start, end, is_continued=False)
        self._doubt(number)

    def _doubt(self, number: int) -> None:
        self._believed.pop(number, None)
        self._on_loss(number)

    async def _keep_divergences(self) -> None:
        for number, reason in list(self._lost.diverged.items()):
            if number in self._kept:
                continue

            def keep(number: int = number, reason: str = reason) -> None:
                self._state.mark_diverged(number, reason)

            try:
                await self._in_state_thread(keep)
            except (lmdb.Error, OSError) as error:
                # This process remembers the divergence and tries again. A restarted process has to find it again.
                logger.warning("the divergence of a metadata partition cannot be saved", extra={"error": str(error)})
            else:
                self._kept.add(number)
