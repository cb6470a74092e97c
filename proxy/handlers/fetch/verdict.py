"""Decides what a broker's OFFSET_OUT_OF_RANGE means for a partition of two tiers.

See docs/semantics.md 3.5, 3.6, 6.3, 9.3.

The broker's answer proves that the client may read the topic. Before the proxy relays it, the metadata must be fresh,
for unknown topics too (docs/design.md, safety rule 1). The proxy must also have asked the leader after that answer, and
the offset must not lie below the local log. The metadata may not know a partition of a topic that the configuration
tiers. That does not prove that a record below the local log is gone (`ConfiguredTopics`).

Before the proxy releases remote data, the offset must lie below a local log start that the leader told in its current
leader epoch. Otherwise the offset might lie beyond the end of a new leader's log.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from protocol.apis.fetch.request import FetchPartition
from protocol.apis.fetch.response import EpochEndOffset, FetchResponse, out_of_range
from protocol.apis.topic_reference import TopicReference
from proxy.cluster.local_log_bounds import VerifiedBounds
from proxy.handlers.base import HandlerTools, current_partition, is_of_internal_topic, named_partition
from proxy.handlers.fetch.delayed import RemotePartitionRead
from proxy.handlers.fetch.held import HeldFetch, PartitionKey, answer_by_ms
from proxy.handlers.fetch.local import LocalAnswers
from proxy.handlers.leader_epochs import end_offset_for
from proxy.handlers.turns import SLICE_ITEMS, in_slices, slices_of
from tiers.errors import RemoteLogError
from tiers.metadata.remote_log import GapExit
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import UNKNOWN_EPOCH
from tiers.reader.chunk_fetcher import Caller

logger = logging.getLogger(__name__)

_JUDGE_MAX_MS = 5_000
"""The longest time that a judgement runs, whatever deadline the client chose. No response may be waiting for it."""


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
    position: int = -1
    """The offset to read at: the requested offset, or the next one behind the gap that holds it."""


@dataclass(frozen=True, slots=True)
class RefusedPartition:
    """A partition that the broker answered OFFSET_OUT_OF_RANGE, and the request that asked for it."""

    topic: TopicReference
    index: int
    asked: FetchPartition | None
    """The request's entry. None: an incremental request did not name the partition."""
    received_at_ms: int
    connection_id: int


class FetchJudge:
    def __init__(self, tools: HandlerTools, local: LocalAnswers) -> None:
        self.in_neither_tier_count = 0
        """The number of requests for an offset above the log start that neither tier had.

        The metadata was fresh. An increase raises an alarm."""
        self._tools = tools
        self._local = local

    async def judge(self, held: HeldFetch, response: FetchResponse) -> dict[int, Judgement]:
        """Returns the judgements of all out-of-range partitions, by index in the response.

        A partition whose facts are all known is judged at once. The other partitions are judged concurrently, with a
        deadline. If a judgement takes longer, its partition is unavailable in this response, and the judgement
        continues for the next request."""
        # If the request names a partition twice, the broker answers its last entry.
        asked: dict[PartitionKey, FetchPartition] = {}
        async for part in slices_of(held.request.partitions):
            asked.update(((entry.topic, entry.partition), entry) for entry in part)
        until_ms = answer_by_ms(held, response, self._tools.clock_ms())
        judgements: dict[int, Judgement] = {}
        doubtful: dict[int, RefusedPartition] = {}
        async for indexes in slices_of(out_of_range(response), SLICE_ITEMS):
            for index in indexes:
                entry = response.partitions[index]
                key = (entry.topic, entry.partition)
                refused = RefusedPartition(
                    *key, asked.get(key), held.exchange.request.received_at_ms, held.exchange.connection_id
                )
                judgement = self._judge_at_once(refused, held.reads.get(key))
                if judgement is None:
                    doubtful[index] = refused
                else:
                    judgements[index] = judgement
        found = await in_slices(
            list(doubtful.values()),
            lambda refused: self._judge_until(refused, until_ms, held.deadline_ms),
            until_ms - self._tools.clock_ms(),
        )
        judgements.update(zip(doubtful, found, strict=False))
        async for indexes in slices_of(list(doubtful)[len(found) :], SLICE_ITEMS):
            judgements.update((index, self._unavailable(doubtful[index])) for index in indexes)
        return {index: self._unless_paused(judgements[index]) for index in sorted(judgements)}

    def _unless_paused(self, judgement: Judgement) -> Judgement:
        """While an operator pauses the reading of a topic, its remote offsets are unavailable, and not out of range."""
        partition = judgement.partition
        if judgement.verdict is not Verdict.REMOTE or partition is None:
            return judgement
        is_paused = self._tools.log.is_reading_paused(partition)
        return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True) if is_paused else judgement

    def _judge_at_once(self, refused: RefusedPartition, running: RemotePartitionRead | None) -> Judgement | None:
        """Returns the judgement in the common cases that need no question to a broker. None: call `_judge_one`."""
        if running is not None and not running.has_budget:
            # This read may return no bytes, so its judgement does not matter. A request for thousands of partitions
            # therefore judges only a few.
            return Judgement(Verdict.REMOTE, running.request.partition, is_tiered=True, position=running.request.offset)
        asked = refused.asked
        if asked is None or asked.last_fetched_epoch >= 0 or not isinstance(refused.topic, UUID):
            return None
        log, partition = self._tools.log, named_partition(self._tools, refused.topic, refused.index)
        known = self._known_bounds(partition, asked, refused.received_at_ms)
        if known is None or not log.is_fresh(partition):
            return None
        if log.remote_position(partition, asked.fetch_offset) != asked.fetch_offset:
            return None
        return Judgement(Verdict.REMOTE, partition, is_tiered=True, position=asked.fetch_offset)

    async def _judge_until(self, refused: RefusedPartition, until_ms: int, deadline_ms: int) -> Judgement:
        found: asyncio.Future[Judgement] = asyncio.get_running_loop().create_future()
        self._tools.spawn(self._judge_into(found, refused, deadline_ms))
        try:
            async with asyncio.timeout(max(1, until_ms - self._tools.clock_ms()) / 1000):
                return await found
        except TimeoutError:
            return self._unavailable(refused)

    async def _judge_into(self, found: asyncio.Future[Judgement], refused: RefusedPartition, deadline_ms: int) -> None:
        """Judges one partition, and sets the result of `found`. Continues when the response could not wait longer.

        The facts that it learns are then known for the next request. Otherwise that request would start again, and
        would reach its deadline again."""
        deadline_ms = min(deadline_ms, self._tools.clock_ms() + _JUDGE_MAX_MS)
        try:
            async with asyncio.timeout(max(1, deadline_ms - self._tools.clock_ms()) / 1000):
                judgement = await self._judge_one(refused, deadline_ms)
        except (TimeoutError, RemoteLogError):
            judgement = self._unavailable(refused)
        except Exception:  # a defect may fail this partition, but must not end the server's task group
            judgement = self._unavailable(refused)
            extra = {"partition": str(judgement.partition)}
            logger.exception("a partition cannot be judged: it is unavailable", extra=extra)
        if not found.done():
            found.set_result(judgement)

    def _unavailable(self, refused: RefusedPartition) -> Judgement:
        known = self._local.known_partition(refused.topic, refused.index)
        return Judgement(Verdict.UNAVAILABLE, known, is_tiered=self._local.is_tiered(refused.topic))

    async def _judge_one(self, refused: RefusedPartition, deadline_ms: int) -> Judgement:
        tools, log, asked = self._tools, self._tools.log, refused.asked
        after_refusal_ms = tools.clock_ms() + 1  # a question of the same millisecond may be older than the refusal
        if is_of_internal_topic(tools, refused.topic):
            return Judgement(Verdict.RELAY)
        partition = await current_partition(tools, refused.topic, refused.index)
        if partition is None:
            return Judgement(Verdict.UNAVAILABLE)
        is_known_for_good = asked is not None and log.is_known_for_good(partition, asked.fetch_offset)
        if not is_known_for_good:
            await log.ensure_fresh(partition, self._metadata_timeout_ms(deadline_ms))
        is_known = log.is_tiered(partition)
        if not is_known:
            timeout_ms = self._metadata_timeout_ms(deadline_ms)
            if not await tools.configured.is_tiered(partition.topic_id, timeout_ms):
                return Judgement(Verdict.RELAY, partition)
        if asked is None:
            return Judgement(Verdict.UNSEEN, partition, is_tiered=True)
        try:
            verified = await self._bounds(partition, asked, refused.received_at_ms)
            log_start = max(asked.fetch_offset + 1, log.remote(partition).log_start())
            if log_start > verified.bounds.log_start_offset:
                # The known bounds may be older than the trim that led to this refusal, or than the log start.
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
            is_of_who_refused = asked.current_leader_epoch in (UNKNOWN_EPOCH, bounds.leader_epoch)
            is_true = is_true and is_of_who_refused and not is_known_for_good
            return Judgement(Verdict.RELAY if is_true else Verdict.UNAVAILABLE, partition, is_tiered=True)
        if asked.last_fetched_epoch > bounds.leader_epoch:
            # The log has no such epoch (docs/semantics.md 6.3).
            return Judgement(Verdict.RELAY, partition, is_tiered=True)
        if not is_known:
            # The remote tier may have records there whose metadata is lost. The owner has not seen the partition yet.
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        try:
            found = await self._below_local_log(partition, asked.fetch_offset, bounds, after_refusal_ms, reading=None)
            if found is None:
                reading = await log.ensure_fresh(partition, self._metadata_timeout_ms(deadline_ms), max_age_ms=0)
                found = await self._below_local_log(
                    partition, asked.fetch_offset, bounds, after_refusal_ms, reading=reading
                )
        except RemoteLogError as error:
            logger.info("it is unknown whether the offset is gone: %s", error, extra={"partition": str(partition)})
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        if found is None:
            self.in_neither_tier_count += 1
            logger.error(
                "the offset lies above the log start, but neither tier has it",
                extra={"partition": str(partition), "offset": asked.fetch_offset},
            )
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        if found.verdict in (Verdict.REMOTE, Verdict.LOCAL) and asked.last_fetched_epoch >= 0:
            return await self._check_divergence(found, asked, deadline_ms, refused.connection_id)
        return found

    async def _below_local_log(
        self,
        partition: TopicIdPartition,
        offset: int,
        bounds: LocalLogBounds,
        after_refusal_ms: int,
        *,
        reading: int | None,
    ) -> Judgement | None:
        """Judges an offset below the local log. None: records should be there, but the metadata does not know them.

        `reading` is the one that was read to its end after the broker refused the offset; None: none was. Raises
        `RemoteLogError`."""
        log = self._tools.log
        remote = log.remote(partition)
        log_start = remote.log_start(bounds.log_start_offset)
        if offset < log_start:
            return Judgement(Verdict.RELAY, partition, is_tiered=True)
        if remote.has(offset):
            return Judgement(Verdict.REMOTE, partition, is_tiered=True, position=offset)
        gap = remote.gap_exit(offset)
        if gap is not None:
            return await self._behind_gap(partition, offset, gap, bounds, after_refusal_ms)
        if reading is None or not remote.is_at_head(offset, log_start):
            return None
        if remote.attempt_at_head(log_start, offset + 1) is not None:
            return None  # behind an attempt that becomes readable, the offset is in a gap
        if await log.has_lost_head(partition, log_start):
            return None
        log.require_fresh(partition, reading)
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
            epochs = await self._tools.reader.leader_epochs(partition, Caller(deadline_ms, connection_id))
            gaps = self._tools.log.remote(partition).gaps()
        except RemoteLogError:
            return Judgement(Verdict.UNAVAILABLE, partition, is_tiered=True)
        end = end_offset_for(epochs, asked.last_fetched_epoch, gaps)
        if end is not None and (end.epoch < asked.last_fetched_epoch or end.end_offset < asked.fetch_offset):
            return found._replace(verdict=Verdict.DIVERGING, diverging_epoch=end)
        return found

    def _metadata_timeout_ms(self, deadline_ms: int) -> int:
        remaining_ms = deadline_ms - self._tools.clock_ms()
        return max(1, min(self._tools.settings.metadata_timeout_ms, remaining_ms))
