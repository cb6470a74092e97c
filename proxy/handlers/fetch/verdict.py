"""Decides what a broker's OFFSET_OUT_OF_RANGE means for a partition of two tiers.

See docs/semantics.md 3.5, 3.6, 6.3, 9.3.

The broker's answer proves that the client may read the topic. Before the proxy relays it, the metadata must be fresh,
for unknown topics too (docs/design.md, safety rule 1). The proxy must also have asked the leader after that answer, and
the offset must not lie below the local log. The metadata may not know a partition of a topic that the configuration
tiers. That does not prove that a record below the local log is gone (`ConfiguredTopics`).

Before the proxy releases remote data, the offset must lie below a local log start that the leader told in its current
leader epoch. Otherwise the offset might lie beyond the end of a new leader's log. A recorded log start hides offsets
only if that leader confirms it, because the leader may have another history.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from protocol.apis.fetch.request import FetchPartition
from protocol.apis.fetch.response import EpochEndOffset
from protocol.apis.topic_reference import TopicReference
from proxy.cluster.local_log_bounds import VerifiedBounds
from proxy.cluster.tiered_partitions import NO_LEADER_EPOCH, GapExit
from proxy.handlers.base import HandlerTools, current_partition
from proxy.handlers.leader_epochs import end_offset_for
from tiers.errors import RemoteLogError
from tiers.metadata.log_history import ConfirmedLogStart
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds

logger = logging.getLogger(__name__)


class Verdict(Enum):
    RELAY = "relay"
    """The offset exists in neither tier."""
    REMOTE = "remote"
    """The remote tier has the offset, or it has the first record behind the gap that holds the offset."""
    LOCAL = "local"
    """The broker's own log has the first record behind the gap that holds the offset."""
    DIVERGING = "diverging"
    """The client's last record differs from the record that the log has at that offset."""
    UNSEEN = "unseen"
    """A tiered partition of an incremental request. Only the client and the broker know its offset."""
    UNAVAILABLE = "unavailable"
    """The proxy cannot decide now."""


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
        """The number of requests for an offset above the log start that neither tier had.

        The metadata was fresh. An increase raises an alarm."""
        self._tools = tools

    def known_partition(self, topic: TopicReference, partition: int) -> TopicIdPartition | None:
        """Returns the partition with the topic id that the proxy knows. Does not wait.

        The id of a topic name may be that of a topic that was deleted since."""
        if isinstance(topic, UUID):
            return TopicIdPartition(topic, partition)
        topic_id = self._tools.topology.topic_id(topic)
        return None if topic_id is None else TopicIdPartition(topic_id, partition, topic)

    def judge_at_once(
        self, topic: TopicReference, index: int, asked: FetchPartition | None, *, received_at_ms: int
    ) -> Judgement | None:
        """Returns the judgement in the common case that needs no question to a broker. None: call `judge`."""
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
        """Judges one partition that the broker answered OFFSET_OUT_OF_RANGE.

        `asked` is the request's entry. None: an incremental request did not name the partition."""
        tools = self._tools
        tiered = tools.tiered
        after_refusal_ms = tools.clock_ms() + 1  # a question of the same millisecond may be older than the refusal
        partition = await current_partition(tools, topic, index)
        if partition is None:
            return Judgement(Verdict.UNAVAILABLE)
        is_known_for_good = asked is not None and tiered.is_known_for_good(partition, asked.fetch_offset)
        if not is_known_for_good and not await tiered.ensure_fresh(partition, self._metadata_timeout_ms(deadline_ms)):
            return Judgement(Verdict.UNAVAILABLE, partition)
        is_known = tiered.is_tiered(partition)
        if not is_known:
            timeout_ms = self._metadata_timeout_ms(deadline_ms)
            if not await tools.configured.is_tiered(partition.topic_id, timeout_ms):
                return Judgement(Verdict.RELAY, partition)
        if asked is None:
            return Judgement(Verdict.UNSEEN, partition, is_tiered=True)
        try:
            verified = await self._bounds(partition, asked, received_at_ms)
            if asked.fetch_offset >= verified.bounds.log_start_offset:
                # The answer to another request's question may be older than the trim that led to this refusal.
                verified = await tools.bounds.ask(partition, after_refusal_ms, tools.settings.bounds_timeout_ms)
        except RemoteLogError as error:
            logger.info("the bounds of the local log are unknown: %s", error, extra={"partition": str(partition)})
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        bounds = verified.bounds
        if bounds.leader_epoch < asked.current_leader_epoch:
            # The bounds are those of a former leader, which may not know that it lost the leadership. The leader that
            # refused the offset is newer.
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        if asked.fetch_offset >= bounds.log_start_offset:
            # The answer is true beyond the log's end, or if the broker does not know the last fetched epoch.
            is_true = asked.fetch_offset > bounds.high_watermark or asked.last_fetched_epoch >= 0
            # A new leader's log may begin lower than that of the leader that refused: retention trims each replica at
            # another time.
            is_of_who_refused = asked.current_leader_epoch in (NO_LEADER_EPOCH, bounds.leader_epoch)
            is_true = is_true and is_of_who_refused and not is_known_for_good
            return Judgement(Verdict.RELAY if is_true else Verdict.UNAVAILABLE, partition, is_tiered=True)
        if asked.last_fetched_epoch > bounds.leader_epoch:
            # The log has no such epoch (docs/semantics.md 6.3).
            return Judgement(Verdict.RELAY, partition, is_tiered=True)
        if not is_known:
            # The remote tier may have records there whose metadata is lost. The owner has not seen the partition yet.
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
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
            logger.info(
                "it is unknown which log start the leader confirms: %s", error, extra={"partition": str(partition)}
            )
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        if found is None:
            self.in_neither_tier_count += 1
            logger.error(
                "the offset lies above the log start, but neither tier has it",
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
        """Judges an offset below the local log. None: records should be there, but the metadata does not know them.

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
        """Judges an offset in a recorded gap by the place where the log continues behind the gap.

        None: behind the gap lie offsets that neither tier has and that no gap explains."""
        tools = self._tools
        if gap.segment_start is None or gap.segment_start > bounds.log_start_offset:
            # The log start must be current. If the broker has trimmed since, the client would skip the trimmed records.
            # And the proxy fetches next from the broker's first offset.
            bounds = (await tools.bounds.ask(partition, after_refusal_ms, tools.settings.bounds_timeout_ms)).bounds
            if offset >= bounds.log_start_offset:
                return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)  # a new leader's log begins lower
        if gap.segment_start is not None and gap.segment_start <= bounds.log_start_offset:
            verdict, position = Verdict.REMOTE, gap.segment_start
        else:
            verdict, position = Verdict.LOCAL, bounds.log_start_offset
        return Judgement(verdict, partition, is_tiered=True, position=position) if position <= gap.end else None

    async def _bounds(self, partition: TopicIdPartition, asked: FetchPartition, received_at_ms: int) -> VerifiedBounds:
        """Returns bounds that are recent enough to tell whether the offset lies below the local log."""
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
            # The broker compares the request's leader epoch with its own before it checks the range
            # (docs/semantics.md 2.3). Therefore bounds of that epoch are valid, whatever their age.
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
        """Checks the client's last fetched epoch against the remote tier's epochs (docs/semantics.md 6.3).

        The broker makes the same check for a local offset."""
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
