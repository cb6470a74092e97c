"""What an OFFSET_OUT_OF_RANGE of the broker means for a partition of two tiers (semantics 3.5, 3.6, 6.3, 9.3).

The broker's answer proves that the client may read the topic. Before the proxy relays it, the metadata must be fresh,
for unknown topics too (safety rule 1). The proxy must also have asked the leader after that answer, and the offset must
not lie below the local log. Before the proxy releases remote data, the offset must lie below a local log start that the
leader told in its current leader epoch. Otherwise the offset might lie beyond the end of a new leader's log. A recorded
log start hides offsets only if that leader confirms it: the leader may have another history.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from protocol.apis.fetch_request import FetchPartition
from protocol.apis.fetch_response import EpochEndOffset
from protocol.apis.topic_reference import TopicReference
from proxy.handlers.base import HandlerTools, current_partition
from proxy.handlers.leader_epochs import end_offset_for
from proxy.local_log_bounds import VerifiedBounds
from proxy.tiered_partitions import NO_LEADER_EPOCH, GapExit
from tiers.errors import RemoteLogError
from tiers.log.log_history import ConfirmedLogStart
from tiers.log.log_source import LocalLogBounds
from tiers.model.ids import TopicIdPartition

logger = logging.getLogger(__name__)


class Verdict(Enum):
    RELAY = "relay"
    """The offset exists in neither tier."""
    REMOTE = "remote"
    """The remote tier has the offset, or has the first record behind the gap that holds the offset."""
    LOCAL = "local"
    """The broker's own log has the first record behind the gap that holds the offset."""
    DIVERGING = "diverging"
    """The client's last record is not the one that the log has there."""
    UNSEEN = "unseen"
    """A tiered partition of an incremental request, whose offset only the client and the broker know."""
    UNAVAILABLE = "unavailable"
    """What is true cannot be found out now."""


class Judgement(NamedTuple):
    verdict: Verdict
    partition: TopicIdPartition | None = None
    is_tiered: bool = False
    diverging_epoch: EpochEndOffset | None = None
    confirmed: ConfirmedLogStart | None = None
    """The leader's answer about the recorded log starts. None: the leader was not asked, since no recorded log start
    lies above the offset."""
    position: int = -1
    """The offset to read at: the requested offset, or the next one behind the gap that holds it."""


class FetchJudge:
    def __init__(self, tools: HandlerTools) -> None:
        self.in_neither_tier_count = 0
        """Offsets above the log start that neither tier had, with all metadata fresh: an alarm."""
        self._tools = tools

    def known_partition(self, topic: TopicReference, partition: int) -> TopicIdPartition | None:
        """Without waiting; a name may be answered with the id of a topic that was deleted since."""
        if isinstance(topic, UUID):
            return TopicIdPartition(topic, partition)
        topic_id = self._tools.topology.topic_id(topic)
        return None if topic_id is None else TopicIdPartition(topic_id, partition, topic)

    def judge_at_once(
        self, topic: TopicReference, index: int, asked: FetchPartition | None, *, received_at_ms: int
    ) -> Judgement | None:
        """What `judge` would find out without asking anybody, in the common case; None: let it."""
        if asked is None or asked.last_fetched_epoch >= 0 or not isinstance(topic, UUID):
            return None
        tiered, partition = self._tools.tiered, TopicIdPartition(topic, index)
        known = self._known_bounds(partition, asked, received_at_ms)
        if known is None or not tiered.is_fresh(partition) or not tiered.holds(partition, asked.fetch_offset):
            return None
        return Judgement(Verdict.REMOTE, partition, is_tiered=True, position=asked.fetch_offset)

    async def judge(
        self,
        topic: TopicReference,
        index: int,
        asked: FetchPartition | None,
        *,
        received_at_ms: int,
        deadline_ms: int,
        connection_id: int,
    ) -> Judgement:
        """`asked` is the request's entry, None when an incremental request did not name the partition."""
        tools = self._tools
        tiered = tools.tiered
        after_refusal_ms = tools.clock_ms() + 1  # later, not as late
        partition = await current_partition(tools, topic, index)
        if partition is None:
            return Judgement(Verdict.UNAVAILABLE)
        is_known_for_good = asked is not None and tiered.is_known_for_good(partition, asked.fetch_offset)
        if not is_known_for_good and not await tiered.ensure_fresh(partition, self._metadata_timeout_ms(deadline_ms)):
            return Judgement(Verdict.UNAVAILABLE, partition)
        if not tiered.is_tiered(partition):
            return Judgement(Verdict.RELAY, partition)
        if asked is None:
            return Judgement(Verdict.UNSEEN, partition, is_tiered=True)
        try:
            verified = await self._bounds(partition, asked, received_at_ms)
            if asked.fetch_offset >= verified.bounds.log_start_offset:
                # What somebody else asked before the refusal may be older than a trim that led to it.
                verified = await tools.bounds.ask(partition, after_refusal_ms, tools.settings.bounds_timeout_ms)
        except RemoteLogError as error:
            logger.info("local log bounds unknown: %s", error, extra={"partition": str(partition)})
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        bounds = verified.bounds
        if bounds.leader_epoch < asked.current_leader_epoch:
            # Of a leader that is none any more, and may not know: the one that refused the offset is newer.
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        if asked.fetch_offset >= bounds.log_start_offset:
            # Beyond the log's end the answer is true; so it is for a last fetched epoch that the broker does not know.
            is_true = asked.fetch_offset > bounds.high_watermark or asked.last_fetched_epoch >= 0
            # A new leader may begin lower than the one that refused: retention trims each replica in its own time.
            is_of_who_refused = asked.current_leader_epoch in (NO_LEADER_EPOCH, bounds.leader_epoch)
            is_true = is_true and is_of_who_refused and not is_known_for_good
            return Judgement(Verdict.RELAY if is_true else Verdict.UNAVAILABLE, partition, is_tiered=True)
        if asked.last_fetched_epoch > bounds.leader_epoch:
            return Judgement(Verdict.RELAY, partition, is_tiered=True)  # the log has no such epoch (semantics 6.3)
        try:
            found = await self._below_local_log(partition, asked.fetch_offset, bounds, after_refusal_ms, is_anew=False)
            if found is None:
                timeout_ms = self._metadata_timeout_ms(deadline_ms)
                if not await tiered.ensure_fresh(partition, timeout_ms, max_age_ms=0):
                    return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
                found = await self._below_local_log(
                    partition, asked.fetch_offset, bounds, after_refusal_ms, is_anew=True
                )
        except RemoteLogError as error:
            logger.info("which log start holds is unknown: %s", error, extra={"partition": str(partition)})
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        if found is None:
            self.in_neither_tier_count += 1
            logger.error(
                "offset is in neither tier, though it lies above the log start",
                extra={"partition": str(partition), "offset": asked.fetch_offset},
            )
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        if found.verdict in (Verdict.REMOTE, Verdict.LOCAL) and asked.last_fetched_epoch >= 0:
            return await self._check_divergence(found, asked, deadline_ms, connection_id)
        return found

    async def _below_local_log(
        self,
        partition: TopicIdPartition,
        offset: int,
        bounds: LocalLogBounds,
        after_refusal_ms: int,
        *,
        is_anew: bool,
    ) -> Judgement | None:
        """Judges an offset below the local log. None: records belong there, and the metadata does not know them.

        `is_anew` is true when the metadata was read to its end after the broker refused the offset. Raises
        `RemoteLogError`."""
        tools, tiered = self._tools, self._tools.tiered
        timeout_ms = tools.settings.bounds_timeout_ms
        confirmed: ConfirmedLogStart | None = None
        recorded = tiered.recorded_log_start(partition)
        if recorded is not None and offset < recorded:
            confirmed = await tools.log_starts.confirmed(partition, bounds.leader_epoch, timeout_ms)
            if confirmed.offset is not None and offset < confirmed.offset:
                return Judgement(Verdict.RELAY, partition, is_tiered=True)
        if tiered.has_segment(partition, offset):
            return Judgement(Verdict.REMOTE, partition, is_tiered=True, confirmed=confirmed, position=offset)
        gap = tiered.gap_exit(partition, offset)
        if gap is not None:
            found = await self._behind_gap(partition, offset, gap, bounds, after_refusal_ms)
            return None if found is None else found._replace(confirmed=confirmed)
        if not is_anew:
            return None
        if confirmed is None:
            confirmed = await tools.log_starts.confirmed(partition, bounds.leader_epoch, timeout_ms)
        log_start = confirmed.offset or 0
        if not tiered.is_at_head(partition, offset, log_start):
            return None
        trim = tiered.unexplained_trim(partition, log_start)
        if trim is not None and await tools.log_starts.holds(partition, trim, bounds.leader_epoch, timeout_ms):
            return None
        return Judgement(Verdict.RELAY, partition, is_tiered=True)

    async def _behind_gap(
        self, partition: TopicIdPartition, offset: int, gap: GapExit, bounds: LocalLogBounds, after_refusal_ms: int
    ) -> Judgement | None:
        """Judges an offset in a recorded gap by where the log goes on behind the gap.

        None: behind the gap lie offsets that no tier has and no gap explains."""
        tools = self._tools
        if gap.segment_start is None or gap.segment_start > bounds.log_start_offset:
            # The log start must be current: the client must not pass over records that were trimmed since it was told,
            # and the proxy fetches next from the broker's first offset.
            bounds = (await tools.bounds.ask(partition, after_refusal_ms, tools.settings.bounds_timeout_ms)).bounds
            if offset >= bounds.log_start_offset:
                return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)  # another leader: its log begins lower
        if gap.segment_start is not None and gap.segment_start <= bounds.log_start_offset:
            verdict, position = Verdict.REMOTE, gap.segment_start
        else:
            verdict, position = Verdict.LOCAL, bounds.log_start_offset
        return Judgement(verdict, partition, is_tiered=True, position=position) if position <= gap.end else None

    async def _bounds(self, partition: TopicIdPartition, asked: FetchPartition, received_at_ms: int) -> VerifiedBounds:
        """Bounds that can tell whether the offset lies below the local log."""
        known = self._known_bounds(partition, asked, received_at_ms)
        if known is not None:
            return known
        return await self._tools.bounds.ask(partition, received_at_ms, self._tools.settings.bounds_timeout_ms)

    def _known_bounds(
        self, partition: TopicIdPartition, asked: FetchPartition, received_at_ms: int
    ) -> VerifiedBounds | None:
        known = self._tools.bounds.verified(partition)
        is_named_by_id = isinstance(asked.topic, UUID)  # a name may mean another topic since then
        if (
            known is not None
            and is_named_by_id
            and asked.fetch_offset < known.bounds.log_start_offset
            and asked.last_fetched_epoch <= known.bounds.leader_epoch
        ):
            # The broker compares a request's leader epoch with its own before it looks at the range (semantics 2.3), so
            # bounds of that epoch hold however old they are.
            if asked.current_leader_epoch >= 0:
                is_enough = asked.current_leader_epoch == known.bounds.leader_epoch
            else:
                is_enough = known.asked_at_ms >= received_at_ms - self._tools.settings.bounds_max_age_ms
            if is_enough:
                return known
        return None

    async def _check_divergence(
        self, found: Judgement, asked: FetchPartition, deadline_ms: int, connection_id: int
    ) -> Judgement:
        """As the broker does for a local offset, on the epochs of the remote tier (semantics 6.3)."""
        partition = found.partition
        assert partition is not None
        try:
            epochs = await self._tools.reader.leader_epochs(
                partition, deadline_ms=deadline_ms, connection_id=connection_id
            )
            gaps = self._tools.tiered.rlmm.gaps(partition)
        except RemoteLogError:
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        end = end_offset_for(epochs, asked.last_fetched_epoch, gaps)
        if end is not None and (end.epoch < asked.last_fetched_epoch or end.end_offset < asked.fetch_offset):
            return found._replace(verdict=Verdict.DIVERGING, diverging_epoch=end)
        return found

    def _metadata_timeout_ms(self, deadline_ms: int) -> int:
        remaining_ms = deadline_ms - self._tools.clock_ms()
        return max(1, min(self._tools.settings.metadata_timeout_ms, remaining_ms))
