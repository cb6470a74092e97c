"""`retain`: large purges. The owners' expiration rules decide what to delete, and executors delete it.

* For existing topics, segments expire by time, by size and by log start. The tier's log start moves first; the brokers
  then delete their records below it as usual. The job leaves a partition alone if its log diverged.
* `retention.bytes` covers both tiers. Only a process that has read the local log knows how many of its bytes are not
  remote, so the job counts these bytes as zero. It deletes at most what expiration would delete. The proxies, which
  read the local log when they copy it, delete the rest.
* For deleted topics, the job deletes all segments, if the deletion is proved and no broker has known the topic for the
  delay that the proxies wait too. The job leaves topics that are only missing to the proxies, which know for how long,
  and to an operator.

The job owns the metadata partitions meanwhile. It also finishes deletions that an earlier run left unfinished.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.chosen_partitions import NothingChosenError, chosen_partitions
from pipeline.config import PipelineConfig
from pipeline.job_services import job_services, tiered_policies, written
from pipeline.maintenance.segment_purge import Purge, purge
from tiers.access.open_tier import OpenTier, open_tier, owned_tier
from tiers.access.progress import SILENCE, Progress
from tiers.bounded_gather import bounded_gather
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import RemoteLogError
from tiers.metadata.log_history import kept_log_start
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.quick_values import garbage_collection_paused
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.deletion.topic_deletion import (
    ClusterTopicExistence,
    begin_partition_deletion,
    deleted_topics,
    end_partition_deletion,
)
from tiers.tasks.history.align import require_aligned, require_no_open_cut
from tiers.tasks.history.stored_facts import LAST_OFFSET, FactsTask
from tiers.tasks.retention.expiration_task import RLMExpirationTask
from tiers.tasks.task_services import TaskServices
from tiers.upkeep.runner import Runner

Sleep = Callable[[float], Awaitable[object]]
_AT_ONCE = 16


@dataclass(slots=True)
class PartitionRetention:
    """What the job deletes, or has deleted, of one partition. `log_start_offset` is the log start after the deletion;
    None: the partition has none."""

    partition: TopicIdPartition
    log_start_offset: int | None
    segments: list[RemoteLogSegmentMetadata]
    purge: Purge | None = None
    error: str | None = None

    @property
    def size_bytes(self) -> int:
        return sum(each.segment_size_bytes for each in self.segments)


@dataclass(slots=True)
class Retention:
    partitions: list[PartitionRetention] = field(default_factory=list)
    is_applied: bool = False
    doubtful: set[TopicIdPartition] = field(default_factory=set)
    """Partitions of topics about whose existence the brokers disagree. The job deletes nothing of them."""
    unproved: set[TopicIdPartition] = field(default_factory=set)
    """Partitions of topics that no broker knows and whose deletion is not proved. The job deletes nothing of them."""

    @property
    def has_findings(self) -> bool:
        return any(each.error or (each.purge and each.purge.failed) for each in self.partitions)


async def plan_retention(
    config: PipelineConfig, topics: str, *, deleted_topics: bool, progress: Progress = SILENCE
) -> Retention:
    """Returns what would be deleted. Raises `RemoteTierError`."""
    async with open_tier(config, progress) as tier:
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder, job_services(tier, Path(folder)) as services:
            if deleted_topics:
                found = await _missing(tier, ClusterTopicExistence(tier.client))
                return Retention(
                    [
                        PartitionRetention(each, None, list(tier.state.list_remote_log_segments(each)))
                        for each in tier.state.partitions()
                        if each in found.deleted
                    ],
                    doubtful=found.doubtful,
                    unproved=found.unproved,
                )
            planned = []
            policies = await _policies(tier, topics)
            with garbage_collection_paused():
                for partition, policy in policies.items():
                    log_start, segments = RLMExpirationTask(services, partition).expired(
                        policy, services.state.log_start_offset(partition) or 0, LAST_OFFSET
                    )
                    planned.append(PartitionRetention(partition, log_start, segments))
            return Retention([each for each in planned if each.segments])


async def retain(
    config: PipelineConfig,
    runner: Runner,
    topics: str,
    *,
    deleted_topics: bool,
    delay_ms: int | None = None,
    sleep: Sleep = asyncio.sleep,
    progress: Progress = SILENCE,
) -> Retention:
    """Deletes what has expired, or what deleted topics left.

    `delay_ms` is how long no broker must have known a deleted topic; None: the configured delay. Raises
    `RemoteTierError`, `JobError`."""
    gone: set[TopicIdPartition] = set()
    done = Retention(is_applied=True)
    policies: dict[TopicIdPartition, TopicPolicy] = {}

    async def choose(tier: OpenTier) -> Iterable[TopicIdPartition]:
        if not deleted_topics:
            policies.update(await _policies(tier, topics))
            return policies
        existence = ClusterTopicExistence(tier.client)
        found = await _missing(tier, existence)
        if found.deleted:
            await sleep((config.remote_log.topic_deletion_delay_ms if delay_ms is None else delay_ms) / 1000)
            before, found = found, await _missing(tier, existence)
            gone.update(before.deleted & found.deleted)
        done.doubtful, done.unproved = found.doubtful, found.unproved
        return gone

    async with owned_tier(config, choose, progress=progress) as tier:
        await tier.refresh()
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder, job_services(tier, Path(folder)) as services:
            if deleted_topics:
                done.partitions = await delete_partitions(services, config, runner, sorted(gone, key=_by_name))
            else:
                # Read the policies again: the retention may have been raised while the job waited for ownership.
                now = await _policies(tier, topics)
                owned = {each: now[each] for each in sorted(now, key=_by_name) if each in policies}
                done.partitions = await expire_partitions(services, config, runner, owned)
        done.partitions = [each for each in done.partitions if each.segments or each.error]
        return done


async def expire_partitions(
    services: TaskServices,
    config: PipelineConfig,
    runner: Runner,
    policies: Mapping[TopicIdPartition, TopicPolicy],
) -> list[PartitionRetention]:
    """Expires segments of partitions that this process owns. All log starts move first, then one purge deletes the
    segments of all partitions."""

    async def aligned(partition: TopicIdPartition) -> tuple[LocalLogBounds, int]:
        timeout_ms = services.settings.request_timeout_ms
        bounds = await services.source.bounds(partition, timeout_ms)
        await require_aligned(services.source, services.state, partition, bounds, timeout_ms)
        return bounds, await kept_log_start(services.source, services.state, partition, timeout_ms)

    async def expire(partition: TopicIdPartition) -> list[RemoteLogSegmentMetadata]:
        remote_end = services.state.remote_end_offset(partition)
        bounds, before = await aligned(partition)
        require_no_open_cut(services.state, partition, before)
        await FactsTask(services, partition).require_proved()
        task = RLMExpirationTask(services, partition)
        log_start, _ = task.expired(policies[partition], before, bounds.log_start_offset)
        expired = await task.expire(policies[partition], bounds, before, 0, remote_end)
        if expired < log_start:
            raise RemoteLogError(
                f"{partition}: nothing expires: this machine's clock and the brokers' differ, or the settings of the"
                " topic were changed meanwhile"
            )
        return task.deletable(policies[partition], expired)

    async def apply(partition: TopicIdPartition) -> None:
        await RLMExpirationTask(services, partition).apply_log_start(*await aligned(partition))

    return await _purged(services, config, runner, list(policies), expire, apply)


async def delete_partitions(
    services: TaskServices, config: PipelineConfig, runner: Runner, partitions: Sequence[TopicIdPartition]
) -> list[PartitionRetention]:
    """Deletes partitions that this process owns and whose topics are deleted."""

    async def end(partition: TopicIdPartition) -> None:
        if not list(services.state.list_remote_log_segments(partition)):
            await end_partition_deletion(services, partition)

    return await _purged(
        services, config, runner, partitions, lambda partition: begin_partition_deletion(services, partition), end
    )


async def _purged(
    services: TaskServices,
    config: PipelineConfig,
    runner: Runner,
    partitions: Sequence[TopicIdPartition],
    begin: Callable[[TopicIdPartition], Awaitable[list[RemoteLogSegmentMetadata]]],
    end: Callable[[TopicIdPartition], Awaitable[None]],
) -> list[PartitionRetention]:
    """Runs `begin`, one purge and `end`. A failure of one partition does not affect the others."""

    async def begun(partition: TopicIdPartition) -> PartitionRetention:
        one = PartitionRetention(partition, None, [])
        try:
            one.segments = await written(services, partition, lambda: begin(partition))
        except RemoteLogError as error:
            one.error = str(error)
        return one

    async def ended(one: PartitionRetention) -> None:
        try:
            await written(services, one.partition, lambda: end(one.partition))
        except RemoteLogError as error:
            one.error = str(error)

    done = await bounded_gather(partitions, begun, _AT_ONCE)
    result = await purge(services, config, runner, [segment for one in done for segment in one.segments])
    purged = result.by_partition()
    for one in done:
        one.log_start_offset = services.state.log_start_offset(one.partition)
        if one.segments:
            one.purge = purged.get(one.partition, Purge())
    await bounded_gather([one for one in done if one.error is None], ended, _AT_ONCE)
    return done


@dataclass(frozen=True, slots=True)
class _Missing:
    """The remote partitions of topics that some broker does not know, grouped by the proof of their deletion."""

    deleted: set[TopicIdPartition]
    unproved: set[TopicIdPartition]
    doubtful: set[TopicIdPartition]


async def _missing(tier: OpenTier, existence: ClusterTopicExistence) -> _Missing:
    known = tier.state.partitions()
    timeout_ms = tier.config.upstream.request_timeout_ms
    gone, doubtful = await existence.gone_and_doubtful({each.topic_id for each in known}, timeout_ms)
    missing = {each for each in known if each.topic_id in gone}
    proved = deleted_topics(tier.state)
    deleted = {each for each in missing if each.topic_id in proved}
    return _Missing(deleted, missing - deleted, {each for each in known if each.topic_id in doubtful})


async def _policies(tier: OpenTier, topics: str) -> dict[TopicIdPartition, TopicPolicy]:
    chosen = set(chosen_partitions(tier.state, topics))
    found = {
        partition: policy
        for policy in await tiered_policies(tier)
        for partition in policy.partitions()
        if partition in chosen
    }
    if not found:
        raise NothingChosenError(f"no tiered topic matches {topics!r}: was it deleted, or is it no longer tiered?")
    return found


def _by_name(partition: TopicIdPartition) -> tuple[str, str, int]:
    return partition.topic, str(partition.topic_id), partition.partition
