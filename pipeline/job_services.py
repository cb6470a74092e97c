"""`job_services`: the services that the tier's tasks need, for a driver that runs them while a runner does the work.

The driver is a member of the consumer group that owns the metadata partitions. Its event loop must not block while
the tasks of the job run, because the group removes a member that sends no heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry

from tiers.access.open_tier import OpenTier
from tiers.broker.share_groups import ClusterShareGroups
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import InvalidTransitionError, OwnershipLostError, RemoteLogMetadataError
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition
from tiers.tasks.copy.spool import Spool
from tiers.tasks.deletion.failed_deletions import FailedDeletions, FailedDeletionsTopic
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.task_services import RemoteLogManagerSettings, TaskServices
from tiers.tasks.tiered_topics import TieredTopics

R = TypeVar("R")

OWNED_AGAIN_MS: Final = 60_000
PAUSES_S: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0)
"""Pauses between attempts to write a partition's metadata."""
_SAID_AFTER: Final = 3
_LOOK_AGAIN_MS: Final = 100

Sleep = Callable[[float], Awaitable[object]]


@contextmanager
def job_services(tier: OpenTier, spool_folder: Path) -> Iterator[TaskServices]:
    """Opens the services for one run.

    A failed deletion is published after the first attempt, because the count of attempts ends with the job."""
    remote_log = tier.config.remote_log
    timeout_ms = tier.config.upstream.request_timeout_ms
    settings = RemoteLogManagerSettings(
        spool_dir=spool_folder,
        remote_log=remote_log,
        request_timeout_ms=timeout_ms,
    )
    failed = FailedDeletionsTopic(
        tier.client, timeout_ms, replication_factor=remote_log.metadata_topic_replication_factor
    )
    spool = Spool(spool_folder, settings.spool_max_bytes, 1)
    try:
        yield TaskServices(
            source=BrokerLogSource(tier.client),
            share_groups=ClusterShareGroups(tier.client),
            storage=tier.storage,
            metadata=tier.metadata,
            settings=settings,
            metrics=RemoteLogManagerMetrics(CollectorRegistry()),
            spool=spool,
            key_ring=tier.key_ring,
            say=tier.progress.say,
            cluster_id=tier.cluster_id,
            failed_deletions=FailedDeletions(failed, publish_after=1),
        )
    finally:
        spool.close()


class NotWrittenError(RemoteLogMetadataError):
    """Every attempt to write failed. A write without an answer may still have taken effect."""


async def until_owned(
    services: TaskServices, partition: TopicIdPartition, timeout_ms: int = OWNED_AGAIN_MS, sleep: Sleep = asyncio.sleep
) -> None:
    """Waits until this member owns `partition`: a rebalance or a busy machine may take the ownership away for a while.

    Raises `OwnershipLostError` after `timeout_ms`."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while not services.log.owns(partition):  # polled, because the manager signals no change
                await sleep(_LOOK_AGAIN_MS / 1000)
    except TimeoutError as error:
        raise OwnershipLostError(
            f"another member owns {partition}: run the job again; 'tidegate tier orphans' lists what this run left"
        ) from error


async def written(
    services: TaskServices,
    partition: TopicIdPartition,
    write: Callable[[], Awaitable[R]],
    timeout_ms: int = OWNED_AGAIN_MS,
    sleep: Sleep = asyncio.sleep,
) -> R:
    """Calls `write` again until its outcome is known, and waits for ownership before each attempt.

    `write` must first check whether an earlier attempt took effect. A line on standard error tells the user when the
    retries take longer.

    Raises `InvalidTransitionError` at once, `OwnershipLostError` after `timeout_ms` without ownership, and
    `NotWrittenError` after the last attempt."""
    failed: RemoteLogMetadataError | None = None
    for attempt, pause_s in enumerate((*PAUSES_S, None), 1):
        try:
            await until_owned(services, partition, timeout_ms, sleep)
        except OwnershipLostError as error:
            if failed is None:
                raise
            # After a failed write a member owns nothing until it knows the outcome of that write.
            raise NotWrittenError(f"{partition}: {failed}; and since then {error}") from failed
        try:
            return await write()
        except InvalidTransitionError:
            raise
        except RemoteLogMetadataError as error:
            failed = error
        if pause_s is not None:
            if attempt == _SAID_AFTER:
                services.say(f"{partition}: writing its metadata failed, and is retried: {failed}")
            await sleep(pause_s)
    raise NotWrittenError(f"{partition}: its metadata cannot be written: {failed}") from failed


async def tiered_policies(tier: OpenTier) -> Collection[TopicPolicy]:
    """Reads the current policies. Raises `BrokerError`."""
    rules = tier.config.topics
    metrics = RemoteLogManagerMetrics(CollectorRegistry())
    topics = TieredTopics(tier.client, rules, metrics, tier.log)
    return (await topics.refresh(tier.config.upstream.request_timeout_ms)).values()
