"""`merge`: small neighbouring segments become one, and no offset is unreadable for a moment.

1. The job owns the metadata partitions of its topics: nobody else copies, clamps, expires or deletes there meanwhile.
2. COPY_SEGMENT_STARTED of every merged segment of a wave, then executors store and read it back, then
   COPY_SEGMENT_FINISHED: from there on it answers for the offsets of its parts, which are all still there.
3. When that was visible for the grace, so that no reader is on its way to the parts: manifests, then the parts go.

Wherever it ends, owners go on as ever: an unfinished merged segment is a leftover, a part that another one answers for
is a second copy; they collect both. What was clamped and what does not continue is left alone.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from pipeline.config import PipelineConfig
from pipeline.job_services import job_services, run_beside, until_owned, write_manifest, written
from pipeline.merge_plan import MergeGroup, MergeLimits, merged_segment, plan_merges, still_stand
from pipeline.merge_task import MergeTask, MergeTaskResult, run_merge_task
from pipeline.segment_purge import Purge, purge
from pipeline.task_runner import TaskRunner
from tiers.errors import InvalidTransitionError, RemoteStorageError
from tiers.manager.segment_deletion import delete_segment, write_state
from tiers.manager.task_services import TaskServices
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.open_tier import OpenTier, each_of, open_tier
from tiers.owned_tier import owned_tier

DEFAULT_GRACE_MS = 60_000
GROUPS_PER_WAVE = 64
LOST_GRACE_MS = 3_000
"""Longer than Spark takes to end what it gave up (`spark.python.task.killTimeout`)."""
_ATTEMPTS = 3
_WRITES_AT_ONCE = 16

Sleep = Callable[[float], Awaitable[object]]


@dataclass(slots=True)
class Merge:
    """`merged` are readable. Parts that `purge` could not delete are tried again by their owner."""

    planned: list[MergeGroup]
    is_applied: bool = False
    merged: list[RemoteLogSegmentMetadata] = field(default_factory=list)
    failed: list[tuple[MergeGroup, str]] = field(default_factory=list)
    purge: Purge = field(default_factory=Purge)


def chosen_partitions(metadata: RemoteLogMetadataReader, topics: str) -> list[TopicIdPartition]:
    """Of the topics whose whole name matches the expression."""
    known = [each for each in metadata.partitions() if re.fullmatch(topics, each.topic)]
    return sorted(known, key=lambda each: (each.topic, each.topic_id, each.partition))


def planned_merges(metadata: RemoteLogMetadataReader, topics: str, limits: MergeLimits) -> list[MergeGroup]:
    found = chosen_partitions(metadata, topics)
    return [group for partition in found for group in plan_merges(metadata, partition, limits)]


async def plan_merge(config: PipelineConfig, topics: str, limits: MergeLimits) -> Merge:
    """What would be merged. Raises `RemoteTierError`."""
    async with open_tier(config) as tier:
        return Merge(planned_merges(tier.metadata, topics, limits))


async def merge(
    config: PipelineConfig, runner: TaskRunner, topics: str, limits: MergeLimits, grace_ms: int = DEFAULT_GRACE_MS
) -> Merge:
    """Raises `RemoteTierError`, `JobError`."""

    async def choose(tier: OpenTier) -> Iterable[TopicIdPartition]:
        return [group.partition for group in planned_merges(tier.metadata, topics, limits)]

    async with owned_tier(config, choose) as tier:
        # As it is now that nobody else changes it.
        await tier.refresh()
        groups = [each for each in planned_merges(tier.metadata, topics, limits) if tier.metadata.owns(each.partition)]
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder, job_services(tier, Path(folder)) as services:
            return await merge_groups(services, config, runner, groups, grace_ms)


async def merge_groups(
    services: TaskServices,
    config: PipelineConfig,
    runner: TaskRunner,
    groups: Sequence[MergeGroup],
    grace_ms: int,
    sleep: Sleep = asyncio.sleep,
) -> Merge:
    """Of partitions that are owned."""
    done = Merge(list(groups), is_applied=True)
    replaced: list[RemoteLogSegmentMetadata] = []
    for first in range(0, len(groups), GROUPS_PER_WAVE):
        wave: Sequence[MergeGroup] = groups[first : first + GROUPS_PER_WAVE]
        for _ in range(_ATTEMPTS):
            wave = await _merge_wave(services, config, runner, wave, done, replaced, sleep)
        done.failed += [(group, "executors were lost again and again") for group in wave]
    if replaced:
        for partition in dict.fromkeys(each.topic_id_partition for each in replaced):
            await write_manifest(services, partition)
        await sleep(max(grace_ms, services.settings.visible_after_ms) / 1000)
        done.purge = await purge(services, config, runner, replaced)
    return done


async def _merge_wave(
    services: TaskServices,
    config: PipelineConfig,
    runner: TaskRunner,
    groups: Sequence[MergeGroup],
    done: Merge,
    replaced: list[RemoteLogSegmentMetadata],
    sleep: Sleep,
) -> list[MergeGroup]:
    """Those that are to be tried again, by another name."""
    started = [merged_segment(each, uuid4(), services.settings.broker_id, services.wall_clock_ms()) for each in groups]
    await each_of(started, lambda segment: _announce(services, segment), _WRITES_AT_ONCE)
    services.checkpoint("merge-started-written")
    plan = [MergeTask(config, services.cluster_id, *pair) for pair in zip(groups, started, strict=True)]
    results = await run_beside(runner, "merging segments", plan, run_merge_task)
    services.checkpoint("merged-objects-written")
    lost: list[MergeTask] = []

    async def commit(task: MergeTask, result: MergeTaskResult) -> None:
        segment = replace(task.merged, custom_metadata=result.custom_metadata)
        error = result.error
        if error is None:
            error = await _finish(services, task.group, segment)
        if error is None:
            done.merged.append(segment)
            replaced.extend(task.group.parts)
        elif result.is_lost:
            lost.append(task)
        else:
            done.failed.append((task.group, error))
            await _discard(services, task.merged, result.custom_metadata)

    await each_of(list(zip(plan, results, strict=True)), lambda pair: commit(*pair), _WRITES_AT_ONCE)
    if lost:
        await sleep(LOST_GRACE_MS / 1000)
        for task in lost:
            await _discard(services, task.merged, None)
    return [task.group for task in lost]


async def _announce(services: TaskServices, segment: RemoteLogSegmentMetadata) -> None:
    await written(
        services,
        segment.topic_id_partition,
        lambda: services.metadata.add_remote_log_segment_metadata(segment),
    )


async def _finish(services: TaskServices, group: MergeGroup, merged: RemoteLogSegmentMetadata) -> str | None:
    """Why it must not count, if it must not."""

    async def write() -> None:
        if not still_stand(services.metadata, group):
            raise InvalidTransitionError("a part of it was deleted or cut meanwhile")
        await write_state(services, merged, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)

    try:
        await written(services, group.partition, write)
    except InvalidTransitionError as error:
        return str(error)
    services.checkpoint("merge-finished-written")
    return None


async def _discard(services: TaskServices, merged: RemoteLogSegmentMetadata, custom_metadata: bytes | None) -> None:
    """What cannot be deleted now is a leftover that the owner collects."""
    if services.metadata.remote_log_segment_metadata_by_id(merged.segment_id) is None:
        return
    try:
        await until_owned(services, merged.topic_id_partition)
        await delete_segment(services, merged, custom_metadata)
    except RemoteStorageError as error:
        await services.failed_deletions.failed(merged, error, services.clock_ms(), services.wall_clock_ms())
