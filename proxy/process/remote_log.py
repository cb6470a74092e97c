"""Composes the remote log of a process: its store, its metadata, and the tasks that copy, trim and expire.

Every process opens the store. The process that maintains the metadata's state also runs the tasks. A store or metadata
topic that is unusable ends the start, because an operator must repair it. If the cluster only cannot be reached, the
process tries again. A store that is down delays nothing: it is opened when it is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from proxy.config import TidegateConfig
from proxy.process.admin.process_view import RunningTasks
from proxy.process.live_settings import LiveSettings
from tiers.access.open_tier import RemoteTierError, open_key_ring, segments_without_metadata, storage_cluster_id
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.share_groups import ClusterShareGroups
from tiers.config.managers import create_metadata_log, create_storage
from tiers.config.tier_config import METADATA_MANAGER, ConfigError
from tiers.errors import BrokerError, BrokerRefusedError, RemoteLogError
from tiers.fitness import Fitness
from tiers.lasting_trouble import LastingTrouble
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.topic.metrics import RemoteLogMetadataMetrics
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.storage.metrics import RemoteStorageMetrics, WriteCircuitMetrics
from tiers.tasks.copy.spool import Spool
from tiers.tasks.deletion.failed_deletions import FailedDeletions, FailedDeletionsTopic
from tiers.tasks.deletion.topic_deletion import ClusterTopicExistence, TopicDeletionTask
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.remote_log_manager import RemoteLogManager
from tiers.tasks.task_services import LocalIndexWriter, RemoteLogManagerSettings, TaskServices
from tiers.tasks.tiered_topics import TieredTopics

logger = logging.getLogger(__name__)

RETRY_MS = 1_000
METADATA_FOLDER: Final = "metadata"
"""The folder of the metadata's state in `state.path`."""


async def wait_for_cluster_id(client: BrokerClient) -> str | None:
    """Returns the cluster's id when a broker answers. Raises `BrokerRefusedError`."""
    failing = LastingTrouble(logger, "no broker answers, trying again", "a broker answers", clock_ms=monotonic_ms)
    while True:
        try:
            cluster_id = (await client.brokers(0)).cluster_id
            failing.ended()
            return cluster_id
        except BrokerRefusedError:
            raise
        except BrokerError as error:
            failing.found(error=str(error))
            await asyncio.sleep(RETRY_MS / 1000)


def metadata_folder(config: TidegateConfig) -> Path:
    """Returns the folder of the metadata's state, and creates it if it is missing. Raises `RemoteTierError`."""
    folder = config.state.path / METADATA_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RemoteTierError(f"[state] path: {folder} cannot be created: {error.strerror}") from error
    return folder


async def open_storage(
    stack: AsyncExitStack, config: TidegateConfig, cluster_id: str | None, registry: CollectorRegistry
) -> LocatedRemoteStorageManager:
    """Opens the configured store; the stack closes it. Raises `RemoteTierError`, `ConfigError`."""
    if config.storage is None:
        raise RemoteTierError("there is no [storage]")
    name = config.storage.implementation
    try:
        storage = create_storage(config.storage, cluster_id or "", RemoteStorageMetrics(registry, name))
    except ValueError as error:
        raise ConfigError(f"[storage] {name}: {error}") from error
    registry.register(WriteCircuitMetrics(storage.write_breakers))
    stack.push_async_callback(storage.close)
    try:
        await storage.open_or_later()
    except RemoteLogError as error:
        raise RemoteTierError(f"the store {name}: {error}") from error
    return storage


async def open_metadata(
    stack: AsyncExitStack,
    live: LiveSettings,
    client: BrokerClient,
    storage: LocatedRemoteStorageManager,
    cluster_id: str | None,
    fitness: Fitness,
) -> RemoteLogMetadataManager:
    """Opens the remote log metadata; the stack closes it. `cluster_id` is the cluster's own.

    Raises `RemoteTierError`, `ConfigError`."""
    config, remote_log = live.config, live.config.remote_log
    common = TopicBasedSettings(
        metadata_folder(config),
        topic=remote_log.metadata_topic_settings,
        refusal_to_create=lambda: _segments_without_metadata(config, client, storage),
        fitness=fitness,
        declares=lambda: live.config.shared_digests(),
        max_age_ms=remote_log.fresh_within_ms,
    )
    try:
        log = create_metadata_log(
            remote_log.metadata_manager, remote_log.plain_metadata_settings(), common, client, cluster_id or ""
        )
    except ValueError as error:
        raise ConfigError(f"{METADATA_MANAGER}: {error}") from error
    stack.push_async_callback(log.close)
    await _opened("the remote log metadata", log.open, log.close)
    return RemoteLogMetadataManager(log)


async def _segments_without_metadata(
    config: TidegateConfig, client: BrokerClient, storage: LocatedRemoteStorageManager
) -> str | None:
    cluster_id = storage_cluster_id(config, (await client.brokers()).cluster_id)
    return await segments_without_metadata(config, cluster_id, storage)


async def run_remote_log_manager(
    stack: AsyncExitStack,
    live: LiveSettings,
    client: BrokerClient,
    storage: LocatedRemoteStorageManager,
    metadata: RemoteLogMetadataManager,
    registry: CollectorRegistry,
    cluster_id: str | None,
    local_indexes: LocalIndexWriter,
) -> RunningTasks:
    """Runs the RLM tasks until the stack closes, and returns them. They follow the settings that a reload changes.

    They have their own task group, so a failure ends nothing else."""
    registry.register(RemoteLogMetadataMetrics(metadata.log.status))
    services = _task_services(live.config, client, storage, metadata, registry, cluster_id, local_indexes)
    topics = TieredTopics(client, live.rules(), services.metrics, metadata.log)
    manager = RemoteLogManager(services, topics, TopicDeletionTask(services, ClusterTopicExistence(client)))

    async def run() -> None:
        try:
            await manager.run()
        except Exception:
            logger.exception("the remote log manager failed: nothing is copied until the process is restarted")

    tasks = asyncio.TaskGroup()
    await tasks.__aenter__()
    stack.push_async_callback(tasks.__aexit__, None, None, None)
    stack.callback(manager.stop)
    tasks.create_task(run())

    def apply(config: TidegateConfig) -> None:
        remote_log = config.remote_log
        services.copy_quota.change(remote_log.copy_max_bytes_per_second, remote_log.copy_quota_window)
        if config.topics != topics.rules:
            topics.change_rules(config.topics)
        manager.settings_changed()

    live.follow(stack, apply)
    return RunningTasks(manager, topics)


async def _opened(
    what: str, opens: Callable[[], Awaitable[None]], undo: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Calls `opens`, and repeats it after every retriable error. Raises `RemoteTierError` after any other."""
    failing = LastingTrouble(
        logger, f"{what} cannot be opened yet, trying again", f"{what} is open", clock_ms=monotonic_ms
    )
    while True:
        try:
            await opens()
        except RemoteLogError as error:
            if undo is not None:
                await undo()
            if not error.retriable:
                raise RemoteTierError(f"{what}: {error}") from error
            failing.found(error=str(error))
            await asyncio.sleep(RETRY_MS / 1000)
        else:
            failing.ended()
            return


def _task_services(
    config: TidegateConfig,
    client: BrokerClient,
    storage: LocatedRemoteStorageManager,
    metadata: RemoteLogMetadataManager,
    registry: CollectorRegistry,
    cluster_id: str | None,
    local_indexes: LocalIndexWriter,
) -> TaskServices:
    remote_log = config.remote_log
    settings = RemoteLogManagerSettings(
        spool_dir=config.state.path / "spool",
        remote_log=remote_log,
        request_timeout_ms=config.upstream.request_timeout_ms,
    )
    return TaskServices(
        source=BrokerLogSource(client),
        share_groups=ClusterShareGroups(client),
        storage=storage,
        outages=storage.outages,
        metadata=metadata,
        settings=settings,
        metrics=RemoteLogManagerMetrics(registry),
        spool=Spool(settings.spool_dir, settings.spool_max_bytes, settings.spool_threads),
        key_ring=open_key_ring(config),
        failed_deletions=FailedDeletions(
            FailedDeletionsTopic(
                client,
                config.upstream.request_timeout_ms,
                replication_factor=remote_log.metadata_topic_replication_factor,
            ),
            publish_after=remote_log.delete_attempts,
        ),
        local_indexes=local_indexes,
        cluster_id=storage_cluster_id(config, cluster_id or ""),
    )
