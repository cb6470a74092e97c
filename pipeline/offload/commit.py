"""`OffloadCommitter`: the driver's metadata writes: what is announced before a task starts, and what is committed
after.

* The driver announces every copy before an executor writes an object. The announcement is one record per partition and
  wave, the plan. It names every attempt that Spark may make at every tile (`tiers/model/copy_plan.py`). By these names,
  the driver or the partition's next owner finishes what is whole and was not committed, and deletes what other copies
  have replaced (`CopyAttempts`). Then the plan ends.
* A segment is committed if it continues the remote log at that moment, and if the leader's log still has every leader
  epoch of the segment, up to the offset where it was copied, under the same topic id. Segments are committed one after
  the other. After one that is not committed, no later one is.
* The driver writes as an owner: the writes are fenced and read back. If the driver loses the ownership for a moment, it
  waits for it and reads the metadata again. It does not commit again what was committed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from uuid import uuid4

from pipeline.job_services import OWNED_AGAIN_MS, NotWrittenError, Sleep, until_owned, written
from pipeline.offload.plan import Backlog
from pipeline.offload.task import OffloadResult, Stop, Stopped
from tiers.bounded_gather import bounded_gather
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import (
    BrokerError,
    LogDivergedError,
    OwnershipLostError,
    RemoteLogError,
    RemoteLogMetadataError,
)
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.tasks.copy.copy_attempts import CopyAttempts
from tiers.tasks.copy.segment_copy import SegmentContinuation, continuation_at
from tiers.tasks.deletion.segment_deletion import delete_attempts
from tiers.tasks.history.align import RLMCutTask, check_epochs, open_cut
from tiers.tasks.history.log_gap_task import LogGapTask
from tiers.tasks.history.stored_facts import FactsTask
from tiers.tasks.task_services import TaskServices
from tiers.verify.read_back import check_stored

ATTEMPTS = 3
"""Attempts of a task in one wave: the first, one after an executor died, and one speculative attempt."""
_AGAIN_MS = 1_000
"""How often the job looks again at a gap that is not recorded yet, or at an attempt that may be whole."""
_OWNED_STILL_MS = 5_000
"""Less than a session timeout: a member that sent no heartbeat for longer is no longer a member."""
_AT_ONCE = 16


class NothingToContinueError(RemoteLogError):
    """The remote log no longer ends where the segments begin: another owner copied or cut it meanwhile."""


@dataclass(slots=True, eq=False)
class PartitionOffload:
    """The state and results of one partition of the run."""

    partition: TopicIdPartition
    policy: TopicPolicy
    cut: RLMCutTask
    facts: FactsTask
    attempts: CopyAttempts
    gaps: LogGapTask
    first_offset: int = -1
    """Where the run began. -1: it has not begun yet."""
    next_offset: int = -1
    remote_end: int | None = None
    copy_epoch: int = -1
    """The leader epoch whose log was compared with the remote records."""
    end_offset: int = 0
    """Exclusive end of what may be copied: the last stable offset, or the offset at which the log is damaged."""
    local_offsets: int = 0
    """The number of offsets that the broker has."""
    is_poisoned: bool = False
    long_hole_at: int = -1
    """Where a hole begins that is too long for a segment, unless the segment begins with it."""
    bytes_per_offset: float | None = None
    failures: int = 0
    is_over: bool = False
    error: str = ""
    segments: int = 0
    log_bytes: int = 0
    missing_offsets: int = 0
    lost: int = 0
    cpu_s: float = 0.0

    def backlog(self, min_bytes: int | None, *, takes_all: bool = False) -> Backlog:
        is_cut = self.next_offset < self.long_hole_at < self.end_offset
        return Backlog(
            self.partition,
            max(0, self.next_offset),
            self.long_hole_at if is_cut else self.end_offset,
            self.bytes_per_offset or 0.0,
            self.policy.segment_bytes,
            self.policy.segment_bytes if min_bytes is None else min_bytes,
            takes_all or self.is_poisoned or is_cut,
        )


@dataclass(frozen=True, slots=True)
class OffloadCommitter:
    services: TaskServices
    is_speculative: bool = False
    """Spark may run two attempts of a slow task at once, so any attempt may have started, whichever one answered."""
    owned_again_ms: int = OWNED_AGAIN_MS
    sleep: Sleep = field(default=asyncio.sleep)

    def of(self, partition: TopicIdPartition, policy: TopicPolicy) -> PartitionOffload:
        services = self.services
        facts, attempts = FactsTask(services, partition), CopyAttempts(services, partition)
        return PartitionOffload(
            partition,
            policy,
            RLMCutTask(services, partition),
            facts,
            attempts,
            LogGapTask(services, partition, facts, attempts),
        )

    async def prepare(self, one: PartitionOffload) -> SegmentContinuation:
        """Does what an owner's round begins with: checks the lineage, finishes attempts and finds where to continue.
        Raises `RemoteLogError`."""
        services, partition = self.services, one.partition
        await self._owned(partition)
        bounds, log_start = await self._surveyed(one)
        while True:
            await one.attempts.run(bounds, log_start)
            start = await one.gaps.copy_start(bounds, log_start)
            if one.gaps.doubt is not None:
                raise one.gaps.doubt
            if start is not None and one.attempts.blocking(start, start + 1) is None:
                break
            if start is not None and one.attempts.error is not None:
                raise one.attempts.error
            await self.sleep(_AGAIN_MS / 1000)
            bounds, log_start = await self._surveyed(one)
        await self._delete_needless(one, bounds, log_start)
        one.next_offset, one.remote_end = start, services.state.remote_end_offset(partition)
        one.first_offset = start if one.first_offset < 0 else one.first_offset
        if not one.is_poisoned:
            one.end_offset = bounds.last_stable_offset
        return await continuation_at(services, partition, start)

    async def _surveyed(self, one: PartitionOffload) -> tuple[LocalLogBounds, int]:
        """Compares the metadata with the stored facts, and the tier with the leader's log. Raises `RemoteLogError`."""
        services, partition, timeout_ms = self.services, one.partition, self.services.settings.request_timeout_ms
        await services.log.ensure_fresh(partition, 0, timeout_ms)
        bounds = await services.source.bounds(partition, timeout_ms)
        if not one.facts.is_proved:
            await one.facts.require_proved()
        is_cut = await one.cut.run(bounds)
        one.copy_epoch = bounds.leader_epoch
        if is_cut:
            bounds = await services.source.bounds(partition, timeout_ms)
        return bounds, one.cut.log_start

    async def collect(self, one: PartitionOffload) -> None:
        """Finishes and deletes the attempts of plans that have not ended.

        Best effort, because every later owner does the same."""
        if self.services.state.copy_plans(one.partition):
            with suppress(RemoteLogError):
                await self._owned(one.partition)
                await self._settle(one)

    async def _settle(self, one: PartitionOffload) -> None:
        bounds, log_start = await self._surveyed(one)
        await one.attempts.run(bounds, log_start)
        await one.gaps.copy_start(bounds, log_start)
        if one.gaps.doubt is not None:
            raise one.gaps.doubt
        await self._delete_needless(one, bounds, log_start)

    async def _delete_needless(self, one: PartitionOffload, bounds: LocalLogBounds, log_start: int) -> None:
        """Deletes the attempts that other copies have replaced, unless a CUT that is not proved holds deletions."""
        services, partition = self.services, one.partition
        if open_cut(services.state, partition, log_start) is None:
            needless = await one.attempts.give_up(bounds, log_start)
            await delete_attempts(services, partition, needless)

    async def announce(self, one: PartitionOffload, bounds: Sequence[int], leader_epoch: int) -> CopyPlan:
        """Announces the tiles between `bounds`. Raises `RemoteLogMetadataError`."""
        plan = CopyPlan(
            topic_id_partition=one.partition,
            writer="",
            event_timestamp_ms=self.services.wall_clock_ms(),
            plan_id=uuid4(),
            attempts=ATTEMPTS,
            leader_epoch=leader_epoch,
            copy_epoch=one.copy_epoch,
            bounds=tuple(bounds),
        )
        await self._written(one.partition, partial(self.services.metadata.put_copy_plan, plan))
        return plan

    async def commit(self, one: PartitionOffload, plan: CopyPlan, result: OffloadResult) -> None:
        """Commits the segments of `result` in order, and ends the plan if it has no other attempt.

        Errors go to `one`."""
        one.cpu_s += result.cpu_s
        segments_before = one.segments
        try:
            await self._owned(one.partition)
            await self.services.log.ensure_fresh(one.partition, 0, self.services.settings.request_timeout_ms)
            for copied in result.copied:
                await self._commit_one(one, copied.segment)
                one.missing_offsets += copied.missing_offsets
        except RemoteLogError as error:
            self._note(one, error)
        else:
            self._learn(one, result.stopped)
        if one.segments > segments_before:
            one.failures = 0
        await self._end(one, plan, result)

    async def _commit_one(self, one: PartitionOffload, segment: RemoteLogSegmentMetadata) -> None:
        # The executor that wrote and verified the segment may have another place at the same path: a folder whose file
        # system is not mounted on its machine.
        await self.services.place.require(self.services, [segment])
        await check_stored(self.services.storage, segment, self.services.key_ring)

        async def write() -> None:
            await self._check(one, segment)  # on each attempt, because time passed while waiting for the ownership
            self.services.checkpoint("segment-checked")
            known = self.services.state.remote_log_segment_metadata_by_id(segment.segment_id)
            if known is not None and known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
                return  # an earlier write without an answer took effect
            if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                # Another owner has deleted it meanwhile.
                raise NothingToContinueError(f"{one.partition}: segment {segment.segment_id.id} was deleted meanwhile")
            self._check_place(one, segment)
            await self.services.metadata.add_remote_log_segment_metadata(segment)
            await self.services.write_state(segment, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)

        await self._written(one.partition, write)
        self.services.checkpoint("segment-committed")
        offsets = segment.end_offset + 1 - segment.start_offset
        one.bytes_per_offset = segment.segment_size_bytes / offsets
        one.next_offset, one.remote_end = segment.end_offset + 1, segment.end_offset
        one.segments += 1
        one.log_bytes += segment.segment_size_bytes

    async def _check(self, one: PartitionOffload, segment: RemoteLogSegmentMetadata) -> None:
        """Checks that the topic is the same, and that its log still has the segment's history."""
        source, timeout_ms = self.services.source, self.services.settings.request_timeout_ms
        await source.bounds(one.partition, timeout_ms)  # fails if the topic id has changed
        await check_epochs(source, segment, segment.start_offset, segment.end_offset, timeout_ms)

    def _check_place(self, one: PartitionOffload, segment: RemoteLogSegmentMetadata) -> None:
        remote_end = self.services.state.remote_end_offset(one.partition)
        if remote_end != one.remote_end or segment.start_offset != one.next_offset:
            raise NothingToContinueError(
                f"{one.partition}: a segment from {segment.start_offset} on does not continue what is remote up to"
                f" {remote_end}"
            )

    async def _written(self, partition: TopicIdPartition, write: Callable[[], Awaitable[object]]) -> None:
        await written(self.services, partition, write, self.owned_again_ms, self.sleep)

    async def _owned(self, partition: TopicIdPartition) -> None:
        await until_owned(self.services, partition, self.owned_again_ms, self.sleep)

    def _note(self, one: PartitionOffload, error: RemoteLogError) -> None:
        one.failures += 1
        one.error = str(error) or repr(error)
        is_gone = isinstance(error, BrokerError) and not error.retriable
        if is_gone or isinstance(error, LogDivergedError | OwnershipLostError | NotWrittenError):
            one.is_over = True

    def _learn(self, one: PartitionOffload, stopped: Stopped | None) -> None:
        if stopped is None:
            one.error = one.error if one.is_poisoned else ""
            return
        match stopped.why:
            case Stop.TOO_LARGE:
                one.bytes_per_offset = max(2 * (one.bytes_per_offset or 0.0), stopped.bytes_per_offset)
            case Stop.LONG_HOLE:
                one.long_hole_at = stopped.offset
            case Stop.POISONED:
                one.is_poisoned, one.end_offset = True, stopped.offset
                one.error = f"offset {stopped.offset}: {stopped.message}"
            case Stop.FAILED | Stop.DIVERGED | Stop.LOST:
                one.error = stopped.message
        one.lost += stopped.why is Stop.LOST
        one.failures += stopped.why not in (Stop.TOO_LARGE, Stop.LONG_HOLE)

    async def _end(self, one: PartitionOffload, plan: CopyPlan, result: OffloadResult) -> None:
        """Ends the plan unless an attempt may have objects. Then `collect` works on it."""
        attempts = plan.attempts if self.is_speculative else min(plan.attempts, result.attempt + 1)
        begun = [plan.segment_id(tile, attempt) for tile in range(len(plan.tiles)) for attempt in range(attempts)]
        with suppress(RemoteLogMetadataError):
            await self._owned(one.partition)
            if not any(map(self._is_left, begun)):
                await self._written(one.partition, partial(self.services.metadata.end_copy_plan, plan))

    def _is_left(self, segment_id: RemoteLogSegmentId) -> bool:
        known = self.services.state.remote_log_segment_metadata_by_id(segment_id)
        return known is not None and known.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED

    async def abandon(self, ones: Sequence[PartitionOffload]) -> None:
        """Finishes and deletes attempts after a run that ended early. Best effort, because every later owner does the
        same. It waits for the ownership only as long as a late heartbeat may take."""
        patient = replace(self, owned_again_ms=_OWNED_STILL_MS)

        async def settle(one: PartitionOffload) -> None:
            with suppress(RemoteLogError):
                await patient._written(one.partition, partial(patient._settle, one))

        await bounded_gather(ones, settle, _AT_ONCE)
