"""`merge`: replaces small adjacent segments by larger ones. Every offset stays readable at every moment.

1. The job owns the metadata partitions of its topics, so no other process copies, cuts, expires or deletes there.
2. For each wave, the job writes COPY_SEGMENT_STARTED for every merged segment. Executors store the merged segments and
   read them back. The driver then looks whether the store has them, since an executor may have another place at the
   same path, and writes COPY_SEGMENT_FINISHED: from then on the merged segment answers for the offsets of its parts.

The owners delete the parts when every proxy has had the time to see the merged segment, and when the store has it. If
the job ends early, the owners also delete an unfinished merged segment, since the parts have its records. The job never
merges segments that are cut, nor segments that do not follow each other. While a CUT of a partition is not proved, it
may still move down. Then the job merges nothing of the partition.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from pipeline.chosen_partitions import chosen_partitions
from pipeline.config import PipelineConfig
from pipeline.job_services import job_services, until_owned, written
from pipeline.maintenance.merge_plan import MergeGroup, MergeLimits, merged_segment, plan_merges, still_stand
from pipeline.maintenance.merge_task import MergeTask, MergeTaskResult, run_merge_task
from pipeline.spark.job import LOST_GRACE_S
from tiers.access.open_tier import OpenTier, open_tier, owned_tier
from tiers.access.progress import SILENCE, Progress
from tiers.bounded_gather import bounded_gather
from tiers.errors import InvalidTransitionError, RemoteLogError, RemoteLogMetadataError, RemoteStorageError
from tiers.metadata.partition_facts import encode_partition_facts, facts_of
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.quick_values import garbage_collection_paused
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.storage.retries import with_retries
from tiers.tasks.deletion.segment_deletion import delete_segment
from tiers.tasks.task_services import TaskServices
from tiers.upkeep.runner import JobError, Runner
from tiers.verify.read_back import check_stored

GROUPS_PER_WAVE = 64
_ATTEMPTS = 3
_WRITES_AT_ONCE = 16

Sleep = Callable[[float], Awaitable[object]]


@dataclass(slots=True)
class Merge:
    """The result. The segments in `merged` are readable. The owners delete their parts, `replaced`."""

    planned: list[MergeGroup]
    is_applied: bool = False
    merged: list[RemoteLogSegmentMetadata] = field(default_factory=list)
    failed: list[tuple[MergeGroup, str]] = field(default_factory=list)
    replaced: list[RemoteLogSegmentMetadata] = field(default_factory=list)
    troubles: dict[TopicIdPartition, RemoteLogError] = field(default_factory=dict)
    """Errors of partitions whose metadata could not be written. The job writes nothing more for these partitions."""


def planned_merges(metadata: RemoteLogMetadataState, topics: str, limits: MergeLimits) -> list[MergeGroup]:
    found = chosen_partitions(metadata, topics)
    with garbage_collection_paused():
        return [group for partition in found for group in plan_merges(metadata, partition, limits)]


async def plan_merge(config: PipelineConfig, topics: str, limits: MergeLimits, progress: Progress = SILENCE) -> Merge:
    """Returns what would be merged. Raises `RemoteTierError`."""
    async with open_tier(config, progress) as tier:
        return Merge(planned_merges(tier.state, topics, limits))


async def merge(
    config: PipelineConfig,
    runner: Runner,
    topics: str,
    limits: MergeLimits,
    progress: Progress = SILENCE,
) -> Merge:
    """Raises `RemoteTierError`, `JobError`."""

    chosen: set[TopicIdPartition] = set()

    async def choose(tier: OpenTier) -> Iterable[TopicIdPartition]:
        chosen.update(group.partition for group in planned_merges(tier.state, topics, limits))
        return chosen

    async with owned_tier(config, choose, progress=progress) as tier:
        # Plan again: only now can no other process change the metadata.
        await tier.refresh()
        groups = [each for each in planned_merges(tier.state, topics, limits) if each.partition in chosen]
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder, job_services(tier, Path(folder)) as services:
            return await merge_groups(services, config, runner, groups)


async def merge_groups(
    services: TaskServices,
    config: PipelineConfig,
    runner: Runner,
    groups: Sequence[MergeGroup],
    sleep: Sleep = asyncio.sleep,
) -> Merge:
    """Merges groups of partitions that this process owns."""
    done = Merge(list(groups), is_applied=True)
    for first in range(0, len(groups), GROUPS_PER_WAVE):
        wave: Sequence[MergeGroup] = groups[first : first + GROUPS_PER_WAVE]
        for _ in range(_ATTEMPTS):
            wave = await _merge_wave(services, config, runner, wave, done, sleep)
        done.failed += [(group, "executors were lost again and again") for group in wave]
    return done


async def _merge_wave(
    services: TaskServices,
    config: PipelineConfig,
    runner: Runner,
    groups: Sequence[MergeGroup],
    done: Merge,
    sleep: Sleep,
) -> list[MergeGroup]:
    """Merges one wave and returns the groups whose tasks were lost. They must be tried again under a new segment id."""
    plan: list[MergeTask] = []

    async def announce(group: MergeGroup) -> None:
        segment = merged_segment(group, uuid4(), services.settings.broker_id, services.wall_clock_ms())
        try:
            if group.partition in done.troubles:
                raise done.troubles[group.partition]
            facts = facts_of(services.log, services.cluster_id, group.partition, is_proved=False)
            await _announce(services, segment)
        except RemoteLogError as error:
            done.failed.append((group, str(error)))
            done.troubles[group.partition] = error
        else:
            plan.append(MergeTask(config, services.cluster_id, group, segment, encode_partition_facts(facts)))

    await bounded_gather(groups, announce, _WRITES_AT_ONCE)
    services.checkpoint("merge-started-written")
    try:
        results = await runner.run("merging segments", plan, run_merge_task)
    except (JobError, asyncio.CancelledError):
        # What the tasks sent to the store may still arrive there. The next owner deletes their objects.
        await sleep(LOST_GRACE_S)
        raise
    services.checkpoint("merged-objects-written")
    lost: list[MergeTask] = []

    async def commit(task: MergeTask, result: MergeTaskResult) -> None:
        segment = replace(task.merged, custom_metadata=result.custom_metadata)
        error = result.error or await _lacking(services, segment)
        if error is None:
            try:
                if task.group.partition in done.troubles:
                    raise done.troubles[task.group.partition]
                error = await _finish(services, task.group, segment)
            except RemoteLogError as trouble:
                # The record may have taken effect. The next owner sees that, and deletes the parts or the merged
                # segment.
                done.failed.append((task.group, str(trouble)))
                done.troubles[task.group.partition] = trouble
                return
        if error is None:
            done.merged.append(segment)
            done.replaced.extend(task.group.parts)
        elif result.is_lost:
            lost.append(task)
        else:
            done.failed.append((task.group, error))
            await _discard(services, task.merged, result.custom_metadata)

    await bounded_gather(list(zip(plan, results, strict=True)), lambda pair: commit(*pair), _WRITES_AT_ONCE)
    if lost:
        await sleep(LOST_GRACE_S)
        for task in lost:
            await _discard(services, task.merged, None)
    return [task.group for task in lost]


async def _lacking(services: TaskServices, merged: RemoteLogSegmentMetadata) -> str | None:
    """Returns why the driver does not find the merged segment in the store; None: it is there."""
    try:
        await with_retries(lambda: check_stored(services.storage, merged, services.key_ring))
    except RemoteStorageError as error:
        return f"the store does not have the merged segment: {error}"
    return None


async def _announce(services: TaskServices, segment: RemoteLogSegmentMetadata) -> None:
    await written(
        services,
        segment.topic_id_partition,
        lambda: services.metadata.add_remote_log_segment_metadata(segment),
    )


async def _finish(services: TaskServices, group: MergeGroup, merged: RemoteLogSegmentMetadata) -> str | None:
    """Finishes the merged segment. Returns None, or the reason why the segment must not be used."""

    async def write() -> None:
        known = services.state.remote_log_segment_metadata_by_id(merged.segment_id)
        if known is not None and known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            return  # an earlier write without an answer took effect, so the parts may be gone already
        if not still_stand(services.state, group):
            raise InvalidTransitionError("a part was deleted or cut meanwhile")
        await services.write_state(merged, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)

    try:
        await written(services, group.partition, write)
    except InvalidTransitionError as error:
        return str(error)
    services.checkpoint("merge-finished-written")
    return None


async def _discard(services: TaskServices, merged: RemoteLogSegmentMetadata, custom_metadata: bytes | None) -> None:
    """Deletes an unfinished merged segment. If that fails, the owner deletes it."""
    try:
        await until_owned(services, merged.topic_id_partition)
        known = services.state.remote_log_segment_metadata_by_id(merged.segment_id)
        if known is None:
            # A meanwhile owner deleted the segment, and the task may have stored its objects after that.
            await _announce(services, merged)
            known = merged
        if known.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            await delete_segment(services, known, custom_metadata)
    except RemoteStorageError as error:
        await services.failed_deletions.failed(merged, error, services.clock_ms(), services.wall_clock_ms())
    except RemoteLogMetadataError as error:
        services.say(f"{merged.topic_id_partition}: an unfinished merge is left to the owner: {error}")
