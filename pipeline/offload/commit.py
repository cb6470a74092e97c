"""The driver's half of an offload's writes: what is announced before a task may begin, and what counts in the end.

* What is to be copied is announced before anybody writes an object: one record per partition and wave, the plan, names
  every attempt that Spark may make at every tile (`tiers/model/copy_plan.py`). What does not count is deleted by that
  name; when the driver dies, whoever owns the partition does it. Then the plan ends.
* A segment counts if it continues what is remote at that moment, and the leader's log still has every leader epoch of
  it up to where it was copied, under the topic's id. One after the other; behind one that does not count none does.
* The writes are an owner's: fenced, and read back. An owner that lost its ownership for a moment waits for it and looks
  again what is there; what was committed meanwhile is not committed twice.
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
from tiers.each_of import each_of
from tiers.errors import (
    BrokerError,
    LogDivergedError,
    OwnershipLostError,
    RemoteLogError,
    RemoteLogMetadataError,
    RemoteStorageError,
)
from tiers.log.log_history import LogStartConfirmation
from tiers.manager.clamp_task import RLMClampTask
from tiers.manager.copy_attempts import check_last_attempt
from tiers.manager.lineage import check_lineage
from tiers.manager.log_gap_task import LogGapTask
from tiers.manager.partition_manifest import PartitionManifestTask
from tiers.manager.segment_continuation import SegmentContinuation, continuation_at
from tiers.manager.segment_deletion import collect_leftovers, delete_segment, write_state
from tiers.manager.task_services import TaskServices
from tiers.manager.topic_policy import TopicPolicy
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

ATTEMPTS = 3
"""Of a task in one wave: the first, one after an executor died, and one beside a slow one."""
_GAP_SEEN_AGAIN_MS = 1_000
"""How often the job looks whether the metadata says meanwhile that a user deleted the records of a gap."""
_OWNED_STILL_MS = 5_000
"""Less than a session: who was not heard for longer is no member any more."""
_AT_ONCE = 16


class NothingToContinueError(RemoteLogError):
    """What the segments were to continue is not there any more: somebody else copied, or cut, meanwhile."""


@dataclass(slots=True, eq=False)
class PartitionOffload:
    """One partition of the run, and what became of it."""

    partition: TopicIdPartition
    policy: TopicPolicy
    clamp: RLMClampTask
    manifest: PartitionManifestTask
    gaps: LogGapTask
    log_starts: LogStartConfirmation
    first_offset: int = -1
    """Where the run began; -1: it did not yet."""
    next_offset: int = -1
    remote_end: int | None = None
    end_offset: int = 0
    """Exclusive: the last stable offset, or where the log cannot be read further."""
    local_offsets: int = 0
    """How many the broker has."""
    is_poisoned: bool = False
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
        return Backlog(
            self.partition,
            max(0, self.next_offset),
            self.end_offset,
            self.bytes_per_offset or 0.0,
            self.policy.segment_bytes,
            self.policy.segment_bytes if min_bytes is None else min_bytes,
            takes_all or self.is_poisoned,
        )


@dataclass(frozen=True, slots=True)
class OffloadCommitter:
    services: TaskServices
    is_speculative: bool = False
    """Spark runs slow tasks twice at a time: any attempt may have been begun, whichever answered."""
    owned_again_ms: int = OWNED_AGAIN_MS
    sleep: Sleep = field(default=asyncio.sleep)

    def of(self, partition: TopicIdPartition, policy: TopicPolicy) -> PartitionOffload:
        services = self.services
        manifest = PartitionManifestTask(services, partition)
        return PartitionOffload(
            partition,
            policy,
            RLMClampTask(services, partition),
            manifest,
            LogGapTask(services, partition, manifest),
            LogStartConfirmation(services.source, services.metadata),
        )

    async def prepare(self, one: PartitionOffload) -> SegmentContinuation:
        """As an owner's round begins: lineage, leftovers, where to go on. Raises `RemoteLogError`."""
        services, partition = self.services, one.partition
        timeout_ms = services.settings.request_timeout_ms
        await self._owned(partition)
        await services.metadata.ensure_fresh(partition, 0, timeout_ms)
        bounds = await services.source.bounds(partition, timeout_ms)
        await one.manifest.check(bounds.log_start_offset)
        log_start = await one.log_starts.confirmed(partition, bounds.leader_epoch, timeout_ms)
        if await one.clamp.run(bounds.log_start_offset, log_start.offset):
            bounds = await services.source.bounds(partition, timeout_ms)
        await collect_leftovers(services, partition)
        while (start := await one.gaps.copy_start(bounds, log_start.offset)) is None:
            await self.sleep(_GAP_SEEN_AGAIN_MS / 1000)
            bounds = await services.source.bounds(partition, timeout_ms)
            log_start = await one.log_starts.confirmed(partition, bounds.leader_epoch, timeout_ms)
        if services.metadata.gaps(partition):
            await one.manifest.run()
            if not one.manifest.is_written:
                raise RemoteLogError(f"{partition}: its manifest cannot be written")
        check_last_attempt(services, partition)
        one.next_offset, one.remote_end = start, services.metadata.remote_end_offset(partition)
        one.first_offset = start if one.first_offset < 0 else one.first_offset
        if not one.is_poisoned:
            one.end_offset = bounds.last_stable_offset
        return await continuation_at(services, partition, start)

    async def collect(self, one: PartitionOffload) -> None:
        """What is left of plans that have not ended. Best effort, as every later owner does the same."""
        if self.services.metadata.copy_plans(one.partition):
            with suppress(RemoteLogError):
                await self._owned(one.partition)
                await collect_leftovers(self.services, one.partition)

    async def announce(self, one: PartitionOffload, bounds: Sequence[int], leader_epoch: int) -> CopyPlan:
        """The tiles between `bounds`. Raises `RemoteLogMetadataError`."""
        plan = CopyPlan(
            topic_id_partition=one.partition,
            writer="",
            event_timestamp_ms=self.services.wall_clock_ms(),
            plan_id=uuid4(),
            attempts=ATTEMPTS,
            leader_epoch=leader_epoch,
            bounds=tuple(bounds),
        )
        await self._written(one.partition, partial(self.services.metadata.put_copy_plan, plan))
        return plan

    async def commit(self, one: PartitionOffload, plan: CopyPlan, result: OffloadResult) -> None:
        """What of the result counts, in order; all else of the plan is deleted. Trouble is noted in `one`."""
        one.cpu_s += result.cpu_s
        segments_before = one.segments
        try:
            await self._owned(one.partition)
            await self.services.metadata.ensure_fresh(one.partition, 0, self.services.settings.request_timeout_ms)
            for copied in result.copied:
                await self._commit_one(one, copied.segment)
                one.missing_offsets += copied.missing_offsets
        except RemoteLogError as error:
            self._note(one, error)
        else:
            self._learn(one, result.stopped)
        if one.segments > segments_before:
            one.failures = 0
        await self._discard(one, plan, result)

    async def _commit_one(self, one: PartitionOffload, segment: RemoteLogSegmentMetadata) -> None:
        async def write() -> None:
            await self._check(one, segment)  # each time: the ownership may have been waited for
            self.services.checkpoint("segment-checked")
            known = self.services.metadata.remote_log_segment_metadata_by_id(segment.segment_id)
            if known is not None and known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
                return  # by the write whose answer was not seen
            if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                # Somebody owned the partition meanwhile, and took the copy for one that had ended.
                raise NothingToContinueError(f"{one.partition}: segment {segment.segment_id.id} was deleted meanwhile")
            self._check_place(one, segment)
            await self.services.metadata.add_remote_log_segment_metadata(segment)
            await write_state(self.services, segment, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)

        await self._written(one.partition, write)
        self.services.checkpoint("segment-committed")
        offsets = segment.end_offset + 1 - segment.start_offset
        one.bytes_per_offset = segment.segment_size_bytes / offsets
        one.next_offset, one.remote_end = segment.end_offset + 1, segment.end_offset
        one.segments += 1
        one.log_bytes += segment.segment_size_bytes

    async def _check(self, one: PartitionOffload, segment: RemoteLogSegmentMetadata) -> None:
        """The topic is the same, and so is its log wherever the segment has it from."""
        source, timeout_ms = self.services.source, self.services.settings.request_timeout_ms
        await source.bounds(one.partition, timeout_ms)  # asked by the topic's id
        epochs = segment.segment_leader_epochs
        ends = [*(entry.start_offset for entry in epochs[1:]), segment.end_offset + 1]
        for entry, end in zip(epochs, ends, strict=True):
            await check_lineage(source, one.partition, entry.epoch, end, timeout_ms)

    def _check_place(self, one: PartitionOffload, segment: RemoteLogSegmentMetadata) -> None:
        remote_end = self.services.metadata.remote_end_offset(one.partition)
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
            case Stop.POISONED:
                one.is_poisoned, one.end_offset = True, stopped.offset
                one.error = f"offset {stopped.offset}: {stopped.message}"
            case Stop.FAILED | Stop.DIVERGED | Stop.LOST:
                one.error = stopped.message
        one.lost += stopped.why is Stop.LOST
        one.failures += stopped.why is not Stop.TOO_LARGE

    async def _discard(self, one: PartitionOffload, plan: CopyPlan, result: OffloadResult) -> None:
        """By name, all that was begun of `plan` and did not come to count; what the store keeps now is deleted by a
        later round, and the plan ends with it."""
        answered = {each.segment.segment_id: each.segment.custom_metadata for each in result.copied}
        if result.stopped is not None and result.stopped.custom_metadata is not None:
            answered[plan.segment_id(result.stopped.tile, result.attempt)] = result.stopped.custom_metadata
        attempts = plan.attempts if self.is_speculative else min(plan.attempts, result.attempt + 1)
        begun = [plan.segment_id(tile, attempt) for tile in range(len(plan.tiles)) for attempt in range(attempts)]
        announced = {each.segment_id: each for each in plan.announced()}
        add = self.services.metadata.add_remote_log_segment_metadata
        with suppress(RemoteLogMetadataError):
            for segment_id in begun:
                if self._is_known(segment_id) and self._unfinished(segment_id) is None:
                    continue
                await self._owned(one.partition)
                if not self._is_known(segment_id):
                    # Who owned the partition meanwhile deleted it, and a task may have stored it after that.
                    await self._written(one.partition, partial(add, announced[segment_id]))
                # While it was not owned, somebody's write may have come to light: ours, too.
                if (known := self._unfinished(segment_id)) is not None:
                    with suppress(RemoteStorageError):
                        await delete_segment(self.services, known, answered.get(segment_id))
            await one.manifest.run()
            if not any(map(self._is_left, begun)):
                await self._written(one.partition, partial(self.services.metadata.end_copy_plan, plan))

    def _is_known(self, segment_id: RemoteLogSegmentId) -> bool:
        return self.services.metadata.remote_log_segment_metadata_by_id(segment_id) is not None

    def _unfinished(self, segment_id: RemoteLogSegmentId) -> RemoteLogSegmentMetadata | None:
        known = self.services.metadata.remote_log_segment_metadata_by_id(segment_id)
        return known if known is not None and known.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED else None

    def _is_left(self, segment_id: RemoteLogSegmentId) -> bool:
        known = self.services.metadata.remote_log_segment_metadata_by_id(segment_id)
        return known is not None and known.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED

    async def abandon(self, ones: Sequence[PartitionOffload]) -> None:
        """After a run that was ended half way; best effort, for every later owner does the same. Nobody waits long for
        it, but for a heartbeat that is late."""
        patient = replace(self, owned_again_ms=_OWNED_STILL_MS)

        async def collect(one: PartitionOffload) -> None:
            with suppress(RemoteLogError):
                await patient._written(one.partition, partial(collect_leftovers, self.services, one.partition))

        await each_of(ones, collect, _AT_ONCE)
