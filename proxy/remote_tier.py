"""The remote tier of a process, composed: store, metadata, reader, the handlers that serve it, and the RLM tasks.

Opened before the first client is let in: a proxy that does not know the metadata yet may not relay an OUT_OF_RANGE
(safety rule 1). A store or a metadata topic that cannot be used is the operator's to mend and ends the start; a cluster
or a store that merely cannot be reached is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from protocol.api_keys import ApiKey
from proxy.config import TidegateConfig
from proxy.exchange import Handler
from proxy.fetch_metrics import RemoteFetchMetrics
from proxy.handlers.base import FetchSettings, HandlerTools, Spawn
from proxy.handlers.delete_records import DeleteRecordsHandler
from proxy.handlers.fetch import FetchHandler
from proxy.handlers.list_offsets import ListOffsetsHandler
from proxy.handlers.offset_for_leader_epoch import OffsetForLeaderEpochHandler
from proxy.local_log_bounds import LocalLogBoundsCache
from proxy.tiered_partitions import TieredPartitions
from proxy.topology import Topology
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.share_groups import ClusterShareGroups
from tiers.config import TopicConfig
from tiers.errors import RemoteLogError
from tiers.log.broker_log import BrokerLogSource
from tiers.manager.metrics import RemoteLogManagerMetrics
from tiers.manager.remote_log_manager import RemoteLogManager
from tiers.manager.settings import RemoteLogManagerSettings, TopicRule
from tiers.manager.spool import Spool
from tiers.manager.task_services import TaskServices
from tiers.manager.tiered_topics import TieredTopics
from tiers.manager.topic_deletion import ClusterTopicExistence, TopicDeletionTask
from tiers.metadata.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic_based import TopicBasedRemoteLogMetadataManager, TopicBasedSettings
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteLogReaderSettings
from tiers.storage.instrumented import InstrumentedRemoteStorageManager, RemoteStorageMetrics
from tiers.storage.registry import create_remote_storage_manager

logger = logging.getLogger(__name__)

RETRY_MS = 1_000


class RemoteTierError(Exception):
    """The tier cannot be opened until somebody changes something; the message says what."""


@dataclass(frozen=True, slots=True)
class RemoteTier:
    handlers: Mapping[int, Handler]
    metadata: TopicBasedRemoteLogMetadataManager
    manager: RemoteLogManager

    def not_ready(self) -> list[str]:
        return [] if self.metadata.alarm is None else [f"the metadata topic: {self.metadata.alarm}"]


@asynccontextmanager
async def remote_tier(
    config: TidegateConfig, client: BrokerClient, topology: Topology, spawn: Spawn, registry: CollectorRegistry
) -> AsyncIterator[RemoteTier]:
    """Raises `RemoteTierError`. `topology` has read the cluster; the RLM tasks run until the context is left."""
    if config.storage is None:
        raise RemoteTierError("there is no [storage]")
    name = config.storage.implementation
    try:
        store = create_remote_storage_manager(
            name, {"cluster.id": topology.cluster_id or "", **config.storage.plain_settings()}
        )
    except ValueError as error:
        raise RemoteTierError(f"[storage] {name}: {error}") from error
    storage = InstrumentedRemoteStorageManager(store, name, RemoteStorageMetrics(registry))
    metadata = TopicBasedRemoteLogMetadataManager(client, _metadata_settings(config))
    source = BrokerLogSource(client)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(storage.close)
        await _opened(f"the store {name}", storage.open)
        stack.push_async_callback(metadata.close)
        await _opened("the remote log metadata", metadata.open, metadata.close)
        reader = await stack.enter_async_context(RemoteLogReader(metadata, storage, _reader_settings(config)))
        settings = _fetch_settings(config)
        tools = HandlerTools(
            topology=topology,
            tiered=TieredPartitions(metadata, settings.metadata_max_age_ms),
            bounds=LocalLogBoundsCache(source, monotonic_ms),
            reader=reader,
            settings=settings,
            clock_ms=monotonic_ms,
            spawn=spawn,
        )
        services = _task_services(config, client, source, storage, metadata, registry)
        rules = [topic_rule(topic) for topic in config.topics]
        manager = RemoteLogManager(
            services,
            TieredTopics(client, rules, services.metrics),
            TopicDeletionTask(services, ClusterTopicExistence(client)),
        )
        await stack.enter_async_context(_running(manager))
        fetch = FetchHandler(tools)
        registry.register(RemoteFetchMetrics(fetch))
        yield RemoteTier(
            {
                ApiKey.FETCH: fetch,
                ApiKey.LIST_OFFSETS: ListOffsetsHandler(tools),
                ApiKey.OFFSET_FOR_LEADER_EPOCH: OffsetForLeaderEpochHandler(tools),
                ApiKey.DELETE_RECORDS: DeleteRecordsHandler(tools, metadata),
            },
            metadata,
            manager,
        )


@asynccontextmanager
async def _running(manager: RemoteLogManager) -> AsyncIterator[None]:
    """The RLM tasks in a task group of their own: what they run into never takes the proxy down."""

    async def run() -> None:
        try:
            await manager.run()
        except Exception:
            logger.exception("the remote log manager ended: nothing is copied until a restart")

    tasks = asyncio.TaskGroup()
    await tasks.__aenter__()
    tasks.create_task(run())
    try:
        yield
    finally:
        manager.stop()
        await tasks.__aexit__(None, None, None)


async def _opened(
    what: str, opens: Callable[[], Awaitable[None]], undo: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Opens, again and again while the trouble may pass."""
    while True:
        try:
            await opens()
        except RemoteLogError as error:
            if undo is not None:
                await undo()
            if not error.retriable:
                raise RemoteTierError(f"{what}: {error}") from error
            logger.warning("%s cannot be opened yet: %s", what, error)
            await asyncio.sleep(RETRY_MS / 1000)
        else:
            return


def _metadata_settings(config: TidegateConfig) -> TopicBasedSettings:
    remote_log = config.remote_log
    topic = MetadataTopicSettings(
        remote_log.metadata_topic, remote_log.metadata_topic_partitions, remote_log.metadata_topic_replication_factor
    )
    folder = config.state.path / "metadata"
    folder.mkdir(parents=True, exist_ok=True)
    return TopicBasedSettings(folder, topic=topic)


def _reader_settings(config: TidegateConfig) -> RemoteLogReaderSettings:
    remote_log = config.remote_log
    return RemoteLogReaderSettings(
        threads=remote_log.reader_threads,
        max_pending_tasks=remote_log.reader_max_pending_tasks,
        max_bytes_in_flight=remote_log.reader_max_bytes_in_flight,
        chunk_cache_bytes=remote_log.chunk_cache_bytes,
        index_cache_bytes=remote_log.index_cache_bytes,
    )


def _fetch_settings(config: TidegateConfig) -> FetchSettings:
    remote_log = config.remote_log
    return FetchSettings(
        remote_fetch_max_wait_ms=remote_log.fetch_max_wait_ms,
        visibility_ms=remote_log.visible_after_ms,
        list_offsets_timeout_ms=remote_log.list_offsets_timeout_ms,
    )


def _task_services(
    config: TidegateConfig,
    client: BrokerClient,
    source: BrokerLogSource,
    storage: InstrumentedRemoteStorageManager,
    metadata: TopicBasedRemoteLogMetadataManager,
    registry: CollectorRegistry,
) -> TaskServices:
    remote_log = config.remote_log
    settings = RemoteLogManagerSettings(
        spool_dir=config.state.path / "spool",
        process_interval_ms=remote_log.task_interval_ms,
        retry_interval_ms=remote_log.task_retry_backoff_ms,
        topics_interval_ms=min(10_000, remote_log.task_interval_ms),
        copier_tasks=remote_log.copier_threads,
        visible_after_ms=remote_log.visible_after_ms,
        custom_metadata_max_bytes=remote_log.custom_metadata_max_bytes,
        request_timeout_ms=config.upstream.request_timeout_ms,
    )
    return TaskServices(
        source=source,
        share_groups=ClusterShareGroups(client),
        storage=storage,
        metadata=metadata,
        settings=settings,
        metrics=RemoteLogManagerMetrics(registry),
        spool=Spool(settings.spool_dir, settings.spool_max_bytes, settings.spool_threads),
    )


def topic_rule(topic: TopicConfig) -> TopicRule:
    return TopicRule(
        topic.pattern,
        remote_storage_enable=topic.remote_storage_enable,
        local_retention_ms=topic.local_retention_ms,
        local_retention_bytes=topic.local_retention_bytes,
        segment_bytes=topic.segment_bytes,
        segment_ms=topic.segment_ms,
        copy_disable=topic.copy_disable,
    )
