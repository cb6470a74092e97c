"""`rebuild`: rebuilds lost metadata or lost indexes from the objects that the store still has.

* `rebuild` makes the metadata from the `.indexes` and `.facts` objects. Executors list and read; this process
  decides and writes, as `tidegate tier rebuild` does. It writes only to a topic that never held a record.
* `rebuild_indexes` makes `.indexes` objects from the `.log` objects of the segments that the metadata names. The job
  owns its partitions meanwhile, so that no other process deletes these segments.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from itertools import groupby

from pipeline.chosen_partitions import chosen_partitions
from pipeline.config import PipelineConfig
from pipeline.maintenance.indexes_task import IndexesResult, IndexesTask, make_indexes
from pipeline.worker import TierStore
from tiers.access.open_tier import (
    OpenTier,
    RemoteTierError,
    open_tier,
    owned_tier,
    readable_segments,
    storage_cluster_id,
    tiered_cluster,
)
from tiers.access.progress import SILENCE, Progress
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.upkeep.rebuild import Rebuild, RebuildOptions, parts_of, plan_rebuild
from tiers.upkeep.rebuild import rebuild as rebuild_metadata
from tiers.upkeep.runner import Runner

SEGMENTS_PER_TASK = 100


async def rebuild(
    config: PipelineConfig, runner: Runner, options: RebuildOptions, progress: Progress = SILENCE
) -> Rebuild:
    """Rebuilds the metadata. Raises `RemoteTierError`, `JobError`."""

    def plan(cluster_id: str) -> Awaitable[Rebuild]:
        return plan_rebuild(TierStore(config, cluster_id), runner)

    return await rebuild_metadata(config, options, plan, progress)


async def rebuild_indexes(
    config: PipelineConfig, runner: Runner, topics: str, *, is_applied: bool, progress: Progress = SILENCE
) -> list[IndexesResult]:
    """Rebuilds missing or damaged indexes and returns the results of all segments, by topic, partition and offset.

    Raises `RemoteTierError`, `JobError`."""
    async with tiered_cluster(config, is_new=True) as (_, cluster):
        cluster_id = storage_cluster_id(config, cluster.cluster_id)
        if config.remote_log.metadata_topic not in cluster.topics:
            raise RemoteTierError(f"there is no topic {config.remote_log.metadata_topic}: rebuild the metadata first")

    async def chosen(tier: OpenTier) -> Iterable[TopicIdPartition]:
        return chosen_partitions(tier.state, topics)

    opening = owned_tier(config, chosen, progress=progress) if is_applied else open_tier(config, progress)
    async with opening as tier:
        await tier.refresh()
        finished = [each for one in await chosen(tier) for each in readable_segments(tier, one)]
        return await _indexes_of(config, runner, cluster_id, finished, is_applied)


async def _indexes_of(
    config: PipelineConfig,
    runner: Runner,
    cluster_id: str,
    segments: Iterable[RemoteLogSegmentMetadata],
    is_applied: bool,
) -> list[IndexesResult]:
    plan = plan_indexes(config, cluster_id, segments, is_applied=is_applied)
    return [one for results in await runner.run("indexes", plan, make_indexes) for one in results]


def plan_indexes(
    config: PipelineConfig,
    cluster_id: str,
    segments: Iterable[RemoteLogSegmentMetadata],
    *,
    is_applied: bool,
    segments_per_task: int = SEGMENTS_PER_TASK,
) -> list[IndexesTask]:
    """Groups segments that follow each other into tasks. A segment whose offsets overlap another one is on its own."""

    def place(segment: RemoteLogSegmentMetadata) -> tuple[str, str, int]:
        partition = segment.topic_id_partition
        return partition.topic, str(partition.topic_id), partition.partition

    tasks: list[IndexesTask] = []
    ordered = sorted(segments, key=lambda each: (place(each), each.start_offset, each.end_offset))
    for _, group in groupby(ordered, place):
        for run in _runs(list(group)):
            parts = parts_of(run, segments_per_task)
            for number, part in enumerate(parts):
                before = parts[number - 1][-1] if number else None
                after = parts[number + 1][0] if number + 1 < len(parts) else None
                tasks.append(IndexesTask(config, cluster_id, tuple(part), before, after, is_applied))
    return tasks


def _runs(segments: Sequence[RemoteLogSegmentMetadata]) -> list[list[RemoteLogSegmentMetadata]]:
    runs: list[list[RemoteLogSegmentMetadata]] = []
    for segment in segments:
        last = runs[-1][-1] if runs else None
        if last is not None and last.cut_at is None and last.end_offset + 1 == segment.start_offset:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs
