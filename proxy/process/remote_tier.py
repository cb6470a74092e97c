"""Builds the remote tier of a worker: the handlers of both tiers.

A worker reads the state that the remote-log process maintains, and asks the remote reader for records. It accepts
clients at once: reads of the local tier wait for neither. Until the remote-log process reports the state as fresh, the
worker answers an OUT_OF_RANGE with an error that clients retry (docs/design.md, safety rule 1).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from protocol.api_keys import ApiKey
from proxy.cluster.broker_configs import BrokerConfigs
from proxy.cluster.configured_topics import ConfiguredTopics
from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from proxy.cluster.remote_sizes import RemoteSizes
from proxy.cluster.topology import Topology
from proxy.config import TidegateConfig
from proxy.handlers.alter_configs import AlterConfigsHandler
from proxy.handlers.base import FetchSettings, HandlerTools
from proxy.handlers.delete_records import DeleteRecordsHandler
from proxy.handlers.delete_topics import DeleteTopicsHandler
from proxy.handlers.describe_configs import DescribeConfigsHandler
from proxy.handlers.describe_log_dirs import DescribeLogDirsHandler
from proxy.handlers.fetch.handler import FetchHandler, RemoteFetchMetrics
from proxy.handlers.guards import MetadataHandler, MetadataTopicGuard, own_ids_guards
from proxy.handlers.list_offsets import ListOffsetsHandler
from proxy.handlers.offset_for_leader_epoch import OffsetForLeaderEpochHandler
from proxy.handlers.topic_tier_configs import TopicTierConfigs
from proxy.process.admin.process_view import ProcessView
from proxy.process.live_settings import LiveSettings
from proxy.process.metadata_changes import RemoteMetadataChanges
from proxy.process.remote_reader import open_shared_metadata
from proxy.process.tracing import open_tracer
from proxy.wire.exchange import Handler, PrefixHandler, Spawn
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.changes import MetadataChanges
from tiers.metadata.metadata_log import FreshMetadata
from tiers.metadata.shared_metadata import SharedMetadata
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.topic.settings import metadata_group_id
from tiers.reader.remote_reads import RemoteReads, TracedReads
from tiers.reader.shared.channel import Address
from tiers.reader.shared.lent_reads import RemoteReadClient
from tiers.tasks.deletion.failed_deletions import FAILED_DELETIONS_TOPIC
from tiers.tasks.history.align import require_aligned


@dataclass(frozen=True, slots=True)
class RemoteTier:
    handlers: Mapping[int, Handler]
    prefix_handlers: Mapping[int, PrefixHandler]
    not_ready: Callable[[], list[str]]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The name of a process among the workers, and the names at which the remote reader and the remote-log process
    listen."""

    name: str
    reads_address: Address
    changes_address: Address


@dataclass(frozen=True, slots=True)
class ProxyParts:
    """The parts of the proxy that its remote tier needs."""

    live: LiveSettings
    client: BrokerClient
    topology: Topology
    """Must have read the cluster already."""
    spawn: Spawn
    registry: CollectorRegistry
    view: ProcessView

    @property
    def config(self) -> TidegateConfig:
        """The settings that are in effect."""
        return self.live.config


def own_topics_of(config: TidegateConfig) -> tuple[str, ...]:
    """Returns the names of the remote log's own topics, which the handlers guard."""
    return (config.remote_log.metadata_topic, FAILED_DELETIONS_TOPIC) if config.is_tiered else ()


@asynccontextmanager
async def remote_tier(proxy: ProxyParts, worker: WorkerPlace) -> AsyncIterator[RemoteTier]:
    """Opens the remote tier of a worker, and closes it when the context exits. Raises `RemoteTierError`."""
    config = proxy.config
    async with AsyncExitStack() as stack:
        tracer = open_tracer(stack, config)
        shared = open_shared_metadata(stack, config)
        max_age_ms = config.remote_log.fresh_within_ms
        reads = await stack.enter_async_context(RemoteReadClient(worker.reads_address, monotonic_ms))
        changes = RemoteMetadataChanges(worker.changes_address)
        stack.callback(changes.close)
        handlers = tier_handlers(proxy, shared, changes, reads, tracer)
        yield _guarded(config, handlers, lambda: _stale(shared, max_age_ms))


def _log_dirs(proxy: ProxyParts, metadata: RemoteLogMetadataState) -> Mapping[int, Handler]:
    config = proxy.config
    if config.storage is None:
        return {}
    sizes = RemoteSizes(metadata, proxy.client, monotonic_ms, proxy.spawn)
    return {ApiKey.DESCRIBE_LOG_DIRS: DescribeLogDirsHandler(sizes.led_by, f"remote://{config.storage.implementation}")}


def _guarded(config: TidegateConfig, handlers: Mapping[int, Handler], not_ready: Callable[[], list[str]]) -> RemoteTier:
    """Returns the remote tier with the guards of the owners' group and transactional ids."""
    guards, prefix_guards = own_ids_guards(metadata_group_id(config.remote_log.metadata_topic))
    return RemoteTier({**handlers, **guards}, prefix_guards, not_ready)


def _stale(shared: SharedMetadata, max_age_ms: int) -> list[str]:
    age_ms = shared.freshness_age_ms()
    if age_ms is not None and age_ms <= max_age_ms:
        return []
    return ["the remote log metadata is stale: the remote-log process has not read it to its end recently"]


def tier_handlers(
    proxy: ProxyParts, metadata: FreshMetadata, changes: MetadataChanges, reader: RemoteReads, tracer: Tracer | None
) -> Mapping[int, Handler]:
    settings = FetchSettings(proxy.config.remote_log, proxy.config.limits)
    log_source, broker_configs = BrokerLogSource(proxy.client), BrokerConfigs(proxy.client)
    rules = proxy.live.rules
    tools = HandlerTools(
        topology=proxy.topology.topics,
        metadata=metadata,
        bounds=LocalLogBoundsCache(log_source, monotonic_ms),
        source=log_source,
        reader=reader if tracer is None else TracedReads(reader, tracer, metadata.state),
        settings=settings,
        clock_ms=monotonic_ms,
        spawn=proxy.spawn,
        configured=ConfiguredTopics(
            rules, metadata, proxy.topology.topics, broker_configs.of_policy, monotonic_ms, settings.metadata_max_age_ms
        ),
        tracer=tracer,
    )
    proxy.view.opened_reads(tools.waiting, proxy.topology.topics.topic_name)
    fetch = FetchHandler(tools)
    own_topics = own_topics_of(proxy.config)
    guard = MetadataTopicGuard(own_topics, proxy.topology.topics.topic_name)
    configs = TopicTierConfigs(proxy.topology.topics, broker_configs, metadata, changes, settings, rules, own_topics)
    alter_configs = AlterConfigsHandler(configs, proxy.spawn)
    proxy.registry.register(RemoteFetchMetrics(fetch))
    return {
        **_log_dirs(proxy, metadata.state),
        ApiKey.FETCH: fetch,
        ApiKey.METADATA: MetadataHandler(own_topics),
        ApiKey.LIST_OFFSETS: ListOffsetsHandler(tools),
        ApiKey.OFFSET_FOR_LEADER_EPOCH: OffsetForLeaderEpochHandler(tools),
        ApiKey.DELETE_RECORDS: DeleteRecordsHandler(
            tools, changes, partial(require_aligned, log_source, metadata.state), own_topics
        ),
        ApiKey.DELETE_TOPICS: DeleteTopicsHandler(guard, metadata, changes),
        ApiKey.CREATE_PARTITIONS: guard,
        ApiKey.CREATE_TOPICS: alter_configs,
        ApiKey.ALTER_CONFIGS: alter_configs,
        ApiKey.INCREMENTAL_ALTER_CONFIGS: alter_configs,
        ApiKey.DESCRIBE_CONFIGS: DescribeConfigsHandler(configs),
    }
