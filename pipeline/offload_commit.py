"""The driver's half of an offload's writes: what is announced before a task may begin, and what counts in the end.

* Segments are announced (COPY_SEGMENT_STARTED) before anybody writes their objects, so all objects have a name that the
  metadata knows. What does not count is deleted by that name; when the driver dies, whoever owns the partition does it.
* A segment counts if it continues what is remote at that moment, and the leader's log still has every leader epoch of
  it up to where it was copied, under the topic's id. One after the other; behind one that does not count none does.
* The writes are an owner's: fenced, and read back. An owner that lost its ownership for a moment waits for it and looks
  again what is there; what was committed meanwhile is not committed twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from pipeline.offload_plan import Backlog
from pipeline.offload_task import OffloadResult, Stop, Stopped, Tile
from tiers.errors import (
    BrokerError,
    InvalidTransitionError,
    LogDivergedError,
    OwnershipLostError,
    RemoteLogError,
    RemoteLogMetadataError,
    RemoteStorageError,
)
from tiers.manager.clamp_task import RLMClampTask
from tiers.manager.copy_attempts import check_last_attempt
from tiers.manager.copy_task import RLMCopyTask
from tiers.manager.lineage import check_lineage
from tiers.manager.partition_manifest import PartitionManifestTask
from tiers.manager.segment_continuation import SegmentContinuation, continuation_at
from tiers.manager.segment_deletion import collect_leftovers, delete_segment, write_state
from tiers.manager.task_services import TaskServices
from tiers.manager.topic_policy import TopicPolicy
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

OWNED_AGAIN_MS = 60_000
"""For so long a write waits for the ownership: members of the group come and go."""
_LOOK_AGAIN_MS = 100
_HOLE_SEEN_AGAIN_MS = 1_000
_LOG = logging.getLogger(__name__)


class NothingToContinueError(RemoteLogError):
    """What the segments were to continue is not there any more: somebody else copied, or cut, meanwhile."""


@dataclass(slots=True, eq=False)
class PartitionOffload:
    """One partition of the run, and what became of it."""

    partition: TopicIdPartition
    policy: TopicPolicy
    clamp: RLMClampTask
    copy: RLMCopyTask
    manifest: PartitionManifestTask
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
    owned_again_ms: int = OWNED_AGAIN_MS
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep)

    def of(self, partition: TopicIdPartition, policy: TopicPolicy) -> PartitionOffload:
        services = self.services
        return PartitionOffload(
            partition,
            policy,
            RLMClampTask(services, partition),
            RLMCopyTask(services, partition),
            PartitionManifestTask(services, partition),
        )

    async def prepare(self, one: PartitionOffload) -> SegmentContinuation:
        """As an owner's round begins: lineage, leftovers, where to go on. Raises `RemoteLogError`."""
        services, partition = self.services, one.partition
        timeout_ms = services.settings.request_timeout_ms
        await self._owned(partition)
        await services.metadata.ensure_fresh(partition, 0, timeout_ms)
        bounds = await services.source.bounds(partition, timeout_ms)
        if await one.clamp.run(bounds.log_start_offset):
            bounds = await services.source.bounds(partition, timeout_ms)
        await collect_leftovers(services, partition)
        await one.manifest.check()
        start = await one.copy.start_offset(bounds)
        if start is None:  # a hole: it counts when it is seen a second time
            await self.sleep(_HOLE_SEEN_AGAIN_MS / 1000)
            bounds = await services.source.bounds(partition, timeout_ms)
            start = await one.copy.start_offset(bounds)
        if start is None:
            raise NothingToContinueError(f"{partition}: where the log starts is not known yet")
        check_last_attempt(services, partition)
        one.next_offset, one.remote_end = start, services.metadata.remote_end_offset(partition)
        one.first_offset = start if one.first_offset < 0 else one.first_offset
        if not one.is_poisoned:
            one.end_offset = bounds.last_stable_offset
        return await continuation_at(services, partition, start)

    async def announce(self, one: PartitionOffload, tiles: Sequence[Tile], leader_epoch: int) -> None:
        """Raises `RemoteLogMetadataError`."""
        for tile in tiles:
            announced = RemoteLogSegmentMetadata(
                segment_id=tile.segment_id,
                start_offset=tile.lo,
                end_offset=tile.hi - 1,
                broker_id=self.services.settings.broker_id,
                max_timestamp_ms=-1,
                event_timestamp_ms=self.services.wall_clock_ms(),
                segment_leader_epochs=(LeaderEpochEntry(leader_epoch, tile.lo),),
                segment_size_bytes=int((tile.hi - tile.lo) * (one.bytes_per_offset or 0.0)),
                state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
            )
            await self._written(
                one.partition, partial(self.services.metadata.add_remote_log_segment_metadata, announced)
            )

    async def commit(self, one: PartitionOffload, tiles: Sequence[Tile], result: OffloadResult) -> None:
        """What of the result counts, in order; all else of it is deleted. Trouble is noted in `one`."""
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
        await self._discard(one, tiles, result)

    async def _commit_one(self, one: PartitionOffload, segment: RemoteLogSegmentMetadata) -> None:
        await self._check(one, segment)
        self.services.checkpoint("segment-checked")

        async def write() -> None:
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

    async def _written(self, partition: TopicIdPartition, write: Callable[[], Awaitable[None]]) -> None:
        """Again and again while the ownership, or what came of a write, is not known."""
        while True:
            await self._owned(partition)
            try:
                await write()
            except InvalidTransitionError:
                raise
            except RemoteLogMetadataError as error:
                _LOG.warning("a commit is tried again", extra={"partition": str(partition), "error": str(error)})
                await self.sleep(_LOOK_AGAIN_MS / 1000)
            else:
                return

    async def _owned(self, partition: TopicIdPartition) -> None:
        try:
            async with asyncio.timeout(self.owned_again_ms / 1000):
                while not self.services.metadata.owns(partition):
                    await self.sleep(_LOOK_AGAIN_MS / 1000)
        except TimeoutError as error:
            raise OwnershipLostError(f"{partition} is owned by another member") from error

    def _note(self, one: PartitionOffload, error: RemoteLogError) -> None:
        one.failures += 1
        one.error = str(error) or repr(error)
        is_gone = isinstance(error, BrokerError) and not error.retriable
        if is_gone or isinstance(error, LogDivergedError | OwnershipLostError):
            one.is_over = True

    def _learn(self, one: PartitionOffload, stopped: Stopped | None) -> None:
        if stopped is None:
            one.error = one.error if one.is_poisoned else ""
            return
        match stopped.why:
            case Stop.LOST:
                one.lost += 1
            case Stop.TOO_LARGE:
                one.bytes_per_offset = max(2 * (one.bytes_per_offset or 0.0), stopped.bytes_per_offset)
            case Stop.POISONED:
                one.is_poisoned, one.end_offset = True, stopped.offset
                one.error = f"offset {stopped.offset}: {stopped.message}"
            case Stop.FAILED | Stop.DIVERGED:
                one.error = stopped.message
        one.failures += stopped.why is not Stop.TOO_LARGE

    async def _discard(self, one: PartitionOffload, tiles: Sequence[Tile], result: OffloadResult) -> None:
        """By name, all of `tiles` that did not come to count; what the store keeps now is deleted by a later round."""
        answered = {each.segment.segment_id: each.segment.custom_metadata for each in result.copied}
        if result.stopped is not None and result.stopped.custom_metadata is not None:
            answered[tiles[result.stopped.tile].segment_id] = result.stopped.custom_metadata
        with suppress(RemoteLogMetadataError):
            for tile in tiles:
                known = self.services.metadata.remote_log_segment_metadata_by_id(tile.segment_id)
                if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                    continue
                await self._owned(one.partition)
                with suppress(RemoteStorageError):
                    await delete_segment(self.services, known, answered.get(tile.segment_id))
            await one.manifest.run()

    async def abandon(self, ones: Sequence[PartitionOffload]) -> None:
        """After a run that was ended half way; best effort, for every later owner does the same."""
        for one in ones:
            with suppress(RemoteLogError):
                await replace(self, owned_again_ms=_HOLE_SEEN_AGAIN_MS)._owned(one.partition)
                await collect_leftovers(self.services, one.partition)
