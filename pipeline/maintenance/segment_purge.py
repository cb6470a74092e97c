"""`purge`: deletes many segments at once. The driver writes DELETE_SEGMENT_STARTED, the executors delete the objects,
and the driver writes DELETE_SEGMENT_FINISHED for the segments whose objects are gone.

If the purge ends early, the partition's owner goes on with the deletions. Repeating it is harmless.
The stored facts call the segments dead before the first object goes, so that `rebuild` does not restore them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

from pipeline.config import PipelineConfig
from pipeline.job_services import NotWrittenError, until_owned, written
from pipeline.worker import worker
from tiers.bounded_gather import bounded_gather
from tiers.errors import (
    InvalidTransitionError,
    OwnershipLostError,
    RemoteLogError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.storage.retries import with_retries
from tiers.tasks.deletion.segment_deletion import finish_deletion
from tiers.tasks.history.stored_facts import FactsTask
from tiers.tasks.task_services import TaskServices
from tiers.upkeep.runner import Runner

SEGMENTS_PER_TASK = 250
_WRITES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class PurgeTask:
    config: PipelineConfig = field(repr=False)
    cluster_id: str
    segments: tuple[RemoteLogSegmentMetadata, ...]


@dataclass(frozen=True, slots=True)
class Undeleted:
    """The error of the store for one segment."""

    id: UUID
    error: str
    is_retriable: bool

    def as_error(self) -> RemoteStorageError:
        return RetriableRemoteStorageError(self.error) if self.is_retriable else RemoteStorageError(self.error)


@dataclass(slots=True)
class Purge:
    """The result of a purge. The owner tries again to delete `failed` segments, from their DELETE record on."""

    deleted: list[RemoteLogSegmentMetadata] = field(default_factory=list)
    failed: list[tuple[RemoteLogSegmentMetadata, str]] = field(default_factory=list)

    def by_partition(self) -> dict[TopicIdPartition, Purge]:
        found: defaultdict[TopicIdPartition, Purge] = defaultdict(Purge)
        for segment in self.deleted:
            found[segment.topic_id_partition].deleted.append(segment)
        for segment, said in self.failed:
            found[segment.topic_id_partition].failed.append((segment, said))
        return dict(found)


async def run_purge_task(task: PurgeTask) -> list[Undeleted]:
    storage = await worker().storage(task.config, task.cluster_id)
    left, refused = list(task.segments), dict[UUID, Undeleted]()

    async def attempt() -> None:
        for segment, error in zip(left, await storage.delete_log_segments(left), strict=True):
            uuid = segment.segment_id.id
            refused.pop(uuid, None)
            if error is not None:
                refused[uuid] = Undeleted(uuid, str(error), error.retriable)
        again = {uuid for uuid, one in refused.items() if one.is_retriable}
        left[:] = [each for each in left if each.segment_id.id in again]
        if left:
            raise RetriableRemoteStorageError(f"{len(left)} segments are left")

    with suppress(RetriableRemoteStorageError):
        await with_retries(attempt)
    return list(refused.values())


async def purge(
    services: TaskServices,
    config: PipelineConfig,
    runner: Runner,
    segments: Sequence[RemoteLogSegmentMetadata],
    *,
    segments_per_task: int = SEGMENTS_PER_TASK,
) -> Purge:
    """Deletes segments of partitions that this process owns. Failures of a partition or of the store are in the result.
    Raises `JobError`."""
    done = Purge()

    async def begin(partition: TopicIdPartition) -> list[RemoteLogSegmentMetadata]:
        begun, facts = by_partition[partition], FactsTask(services, partition)
        try:
            await until_owned(services, partition)
            await facts.require_proved()
            for segment in begun:
                await _start(services, segment)
            await until_owned(services, partition)
            await facts.store()
            await until_owned(services, partition)
        except RemoteLogError as error:
            done.failed += [(segment, str(error)) for segment in begun]
            return []
        return begun

    by_partition: dict[TopicIdPartition, list[RemoteLogSegmentMetadata]] = {}
    for segment in segments:
        by_partition.setdefault(segment.topic_id_partition, []).append(segment)
    partitions = list(by_partition)
    named = [each for begun in await bounded_gather(partitions, begin, _WRITES_AT_ONCE) for each in begun]
    parts = [named[first : first + segments_per_task] for first in range(0, len(named), segments_per_task)]
    plan = [PurgeTask(config, services.cluster_id, tuple(part)) for part in parts]
    answers = await runner.run("deleting segments", plan, run_purge_task)
    refused = {one.id: one for answer in answers for one in answer}

    over: dict[TopicIdPartition, RemoteLogError] = {}

    async def finish(segment: RemoteLogSegmentMetadata) -> None:
        partition = segment.topic_id_partition
        trouble = refused.get(segment.segment_id.id)
        try:
            if trouble is not None:
                raise trouble.as_error()
            if partition in over:
                raise over[partition]
            await _finish(services, segment)
        except RemoteLogError as error:
            done.failed.append((segment, str(error)))
            if isinstance(error, NotWrittenError | OwnershipLostError):
                over[partition] = error  # each of its other segments would wait just as long
            if isinstance(error, RemoteStorageError):
                await services.failed_deletions.failed(segment, error, services.clock_ms(), services.wall_clock_ms())
        else:
            done.deleted.append(segment)

    await bounded_gather(named, finish, _WRITES_AT_ONCE)
    return done


async def _start(services: TaskServices, segment: RemoteLogSegmentMetadata) -> None:
    async def write() -> None:
        known = services.state.remote_log_segment_metadata_by_id(segment.segment_id)
        if known is None:
            return
        if known.state is segment.state and known.cut_at != segment.cut_at:
            raise InvalidTransitionError(
                f"segment {segment.segment_id.id} was cut meanwhile: an operator may delete it"
            )
        await services.write_state(segment, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)

    if segment.state is not RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
        await written(services, segment.topic_id_partition, write)


async def _finish(services: TaskServices, segment: RemoteLogSegmentMetadata) -> None:
    async def write() -> None:
        if services.state.remote_log_segment_metadata_by_id(segment.segment_id) is not None:
            await finish_deletion(services, segment)

    await written(services, segment.topic_id_partition, write)
