"""Builds the remote tier of a proxy process: store, metadata, reader, and the handlers that use them.

The only process of a proxy without workers maintains the metadata's state and runs the RLM tasks. It opens them before
it accepts the first client. A worker reads the state that the remote-log process maintains, and accepts clients at
once: reads of the local tier do not wait for that process. Until that process reports the state as fresh, the worker
answers an OUT_OF_RANGE with an error that clients retry (docs/design.md, safety rule 1).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from protocol.api_keys import ApiKey
from proxy.cluster.broker_configs import BrokerConfigs
from proxy.cluster.configured_topics import ConfiguredTopics
from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from proxy.cluster.tiered_partitions import TieredPartitions
from proxy.cluster.topology import Topology
from proxy.config import TidegateConfig
from proxy.handlers.alter_configs import AlterConfigsHandler
from proxy.handlers.base import FetchSettings, HandlerTools, Spawn
from proxy.handlers.delete_records import DeleteRecordsHandler
from proxy.handlers.delete_topics import DeleteTopicsHandler
from proxy.handlers.describe_configs import DescribeConfigsHandler
from proxy.handlers.fetch.handler import FetchHandler
from proxy.handlers.fetch.metrics import RemoteFetchMetrics
from proxy.handlers.list_offsets import ListOffsetsHandler
from proxy.handlers.metadata import MetadataHandler
from proxy.handlers.metadata_topic_guard import MetadataTopicGuard
from proxy.handlers.offset_for_leader_epoch import OffsetForLeaderEpochHandler
from proxy.handlers.own_ids_guard import own_ids_guards
from proxy.handlers.topic_tier_configs import TopicTierConfigs
from proxy.process.budgets import chunk_folder, remove_other_chunk_folders
from proxy.process.local_indexes import local_indexes_of_worker, writer_of_local_indexes
from proxy.process.probes import process_fitness, run_probes
from proxy.process.remote_log import metadata_folder, open_metadata, open_storage, run_remote_log_manager
from proxy.wire.exchange import Handler, PrefixHandler
from tiers.access.open_tier import open_key_ring
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.log_history import LogStartConfirmation
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.topic.settings import metadata_group_id
from tiers.metadata.topic.shared_reader import SharedRemoteLogMetadataReader
from tiers.metadata.topic.topic_based import wall_clock_ms
from tiers.quota import RemoteFetchQuotas
from tiers.reader.disk_chunk_cache import DiskChunkCache, DiskChunkCacheSettings
from tiers.reader.local_index_cache import LocalIndexes
from tiers.reader.metrics import RemoteLogReaderMetrics
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteLogReaderSettings, decode_index
from tiers.storage.instrumented import InstrumentedRemoteStorageManager
from tiers.tasks.deletion.failed_deletions_topic import FAILED_DELETIONS_TOPIC
from tiers.tasks.history.lineage import check_before_deletion
from tiers.tasks.task_services import NoLocalIndexes

Metadata = RemoteLogMetadataManager | SharedRemoteLogMetadataReader


@dataclass(frozen=True, slots=True)
class RemoteTier:
    handlers: Mapping[int, Handler]
    prefix_handlers: Mapping[int, PrefixHandler]
    not_ready: Callable[[], list[str]]


@dataclass(frozen=True, slots=True)
class ProxyParts:
    """The parts of the proxy that its remote tier needs."""

    config: TidegateConfig
    client: BrokerClient
    topology: Topology
    """Must have read the cluster already."""
    spawn: Spawn
    registry: CollectorRegistry


def own_topics_of(config: TidegateConfig) -> tuple[str, ...]:
    """Returns the names of the remote log's own topics, which the handlers guard."""
    return (config.remote_log.metadata_topic, FAILED_DELETIONS_TOPIC) if config.is_tiered else ()


@asynccontextmanager
async def remote_tier(proxy: ProxyParts, worker: str | None) -> AsyncIterator[RemoteTier]:
    """Opens the remote tier, and closes it when the context exits. Raises `RemoteTierError`.

    `worker` is the name of this process among the workers that share the state. None: this process maintains it."""
    config, client = proxy.config, proxy.client
    async with AsyncExitStack() as stack:
        storage = await open_storage(stack, config, proxy.topology.cluster_id, proxy.registry)
        if worker is None:
            await asyncio.to_thread(remove_other_chunk_folders, config, [worker])
            cluster_id = proxy.topology.cluster_id
            fitness = process_fitness(config)
            metadata = await open_metadata(stack, config, client, storage, cluster_id, fitness)
            await run_probes(stack, config, storage, fitness, proxy.registry)
            indexes = await writer_of_local_indexes(stack, config)
            await run_remote_log_manager(
                stack, config, client, storage, metadata, proxy.registry, cluster_id, indexes or NoLocalIndexes()
            )
            handlers = await _handlers(stack, proxy, storage, metadata, worker, indexes)
            yield _guarded(config, handlers, lambda: alarms(metadata))
        else:
            shared = SharedRemoteLogMetadataReader(
                client,
                metadata_folder(config),
                worker,
                topic_name=config.remote_log.metadata_topic,
                wall_clock_ms=wall_clock_ms,
            )
            stack.push_async_callback(shared.close)
            await shared.open()
            max_age_ms = FetchSettings(config.remote_log, config.limits).metadata_max_age_ms
            indexes = local_indexes_of_worker(config, worker)
            handlers = await _handlers(stack, proxy, storage, shared, worker, indexes)
            yield _guarded(config, handlers, lambda: _stale(shared, max_age_ms))


def _guarded(config: TidegateConfig, handlers: Mapping[int, Handler], not_ready: Callable[[], list[str]]) -> RemoteTier:
    """Returns the remote tier with the guards of the owners' group and transactional ids."""
    guards, prefix_guards = own_ids_guards(metadata_group_id(config.remote_log.metadata_topic))
    return RemoteTier({**handlers, **guards}, prefix_guards, not_ready)


def alarms(metadata: RemoteLogMetadataManager) -> list[str]:
    alarm = metadata.status().alarm
    return [] if alarm is None else [f"the remote log metadata: {alarm}"]


def _stale(metadata: SharedRemoteLogMetadataReader, max_age_ms: int) -> list[str]:
    if metadata.is_all_fresh(max_age_ms):
        return []
    return ["the remote log metadata is stale: the remote-log process has not read it to its end recently"]


async def _handlers(
    stack: AsyncExitStack,
    proxy: ProxyParts,
    storage: InstrumentedRemoteStorageManager,
    metadata: Metadata,
    worker: str | None,
    local_indexes: LocalIndexes | None,
) -> Mapping[int, Handler]:
    settings = FetchSettings(proxy.config.remote_log, proxy.config.limits)
    key_ring = open_key_ring(proxy.config)
    decode = partial(decode_index, ciphers=key_ring)
    reader = await stack.enter_async_context(
        RemoteLogReader(
            metadata,
            storage,
            RemoteLogReaderSettings(proxy.config.remote_log),
            decode_indexes=decode,
            local_indexes=local_indexes,
            disk_chunks=_disk_chunks(proxy.config, worker),
            quotas=_fetch_quotas(proxy.config),
        )
    )
    log_source, broker_configs = BrokerLogSource(proxy.client), BrokerConfigs(proxy.client)
    rules = proxy.config.topics
    tools = HandlerTools(
        topology=proxy.topology,
        tiered=TieredPartitions(metadata, settings.metadata_max_age_ms),
        bounds=LocalLogBoundsCache(log_source, monotonic_ms),
        log_starts=LogStartConfirmation(log_source, metadata),
        reader=reader,
        settings=settings,
        clock_ms=monotonic_ms,
        spawn=proxy.spawn,
        configured=ConfiguredTopics(
            rules, metadata, proxy.topology, broker_configs, monotonic_ms, settings.metadata_max_age_ms
        ),
    )
    fetch = FetchHandler(tools)
    own_topics = own_topics_of(proxy.config)
    guard = MetadataTopicGuard(own_topics, proxy.topology.known_topic_name)
    configs = TopicTierConfigs(proxy.topology, broker_configs, metadata, settings, rules, own_topics)
    alter_configs = AlterConfigsHandler(configs, proxy.spawn)
    proxy.registry.register(RemoteFetchMetrics(fetch))
    proxy.registry.register(RemoteLogReaderMetrics(reader))
    return {
        ApiKey.FETCH: fetch,
        ApiKey.METADATA: MetadataHandler(proxy.topology.advertised_address, own_topics),
        ApiKey.LIST_OFFSETS: ListOffsetsHandler(tools),
        ApiKey.OFFSET_FOR_LEADER_EPOCH: OffsetForLeaderEpochHandler(tools),
        ApiKey.DELETE_RECORDS: DeleteRecordsHandler(
            tools, metadata, partial(check_before_deletion, log_source, metadata), own_topics
        ),
        ApiKey.DELETE_TOPICS: DeleteTopicsHandler(guard, proxy.topology, metadata, proxy.spawn),
        ApiKey.CREATE_PARTITIONS: guard,
        ApiKey.CREATE_TOPICS: alter_configs,
        ApiKey.ALTER_CONFIGS: alter_configs,
        ApiKey.INCREMENTAL_ALTER_CONFIGS: alter_configs,
        ApiKey.DESCRIBE_CONFIGS: DescribeConfigsHandler(configs),
    }


def _fetch_quotas(config: TidegateConfig) -> RemoteFetchQuotas:
    remote_log = config.remote_log
    return RemoteFetchQuotas(
        monotonic_ms,
        window=remote_log.fetch_quota_window,
        bytes_per_second=remote_log.fetch_max_bytes_per_second,
        per_client=config.limits.remote_fetch_max_bytes_per_second,
        per_topic=[(topic.pattern, topic.fetch_max_bytes_per_second) for topic in config.topics],
    )


def _disk_chunks(config: TidegateConfig, worker: str | None) -> DiskChunkCache | None:
    max_bytes = config.remote_log.chunk_file_cache_bytes
    if not max_bytes:
        return None
    return DiskChunkCache(DiskChunkCacheSettings(chunk_folder(config, worker), max_bytes), monotonic_ms)
