"""A proxy in the test's process in front of a real Kafka: real copies, real trims, and a store that can fail.

All parts are those of production, except the metadata, which stays in memory. Blocking clients run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import UUID

from prometheus_client import CollectorRegistry

from protocol.api_keys import ApiKey
from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from proxy.handlers.base import FetchSettings, HandlerTools
from proxy.handlers.delete_records import DeleteRecordsHandler
from proxy.handlers.delete_topics import DeleteTopicsHandler
from proxy.handlers.fetch.handler import FetchHandler
from proxy.handlers.guards import MetadataTopicGuard
from proxy.handlers.list_offsets import ListOffsetsHandler
from proxy.handlers.offset_for_leader_epoch import OffsetForLeaderEpochHandler
from tests.support.fakes.faulty_storage import FaultyStorage
from tests.support.fakes.in_memory_rlmm import IN_MEMORY_TOPIC_ID, InMemoryRemoteLogMetadataManager
from tests.support.proxy.one_worker import one_worker
from tests.support.proxy.parsed_config import parse_config
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.ports import consecutive_free_ports
from tests.support.servers.producing import create_topic, delete_topics, produce, topic_id_partition
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.share_groups import ClusterShareGroups
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import TopicConfig
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition
from tiers.reader.chunk_fetcher import RemoteLogReaderSettings
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.storage.local import LocalRemoteStorageManager
from tiers.tasks.copy.spool import Spool
from tiers.tasks.deletion.topic_deletion import ClusterTopicExistence, TopicDeletionTask
from tiers.tasks.history.align import require_aligned
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.remote_log_manager import RemoteLogManager
from tiers.tasks.task_services import RemoteLogManagerSettings, TaskServices
from tiers.tasks.tiered_topics import TieredTopics

TIMEOUT_MS = 60_000

PATTERN = "tiered-*"
"""The topics that tests tier in this rig."""


@dataclass(frozen=True)
class TwoTiers:
    kafka: KafkaCluster
    bootstrap: str
    """The bootstrap servers of the proxy."""
    client: BrokerClient
    source: BrokerLogSource
    storage: FaultyStorage
    rlmm: InMemoryRemoteLogMetadataManager
    reader: RemoteLogReader
    fetch: FetchHandler

    @property
    def address(self) -> tuple[str, int]:
        """The address of the bootstrap listener, which leads to any broker."""
        return self.address_of(0)

    def address_of(self, node_id: int) -> tuple[str, int]:
        host, _, port = self.bootstrap.partition(":")
        return host, int(port) + node_id

    async def partition(self, topic: str, index: int = 0) -> TopicIdPartition:
        return await topic_id_partition(self.client, topic, index)

    async def local_log_start(self, topic: str, index: int = 0) -> int:
        return (await self.source.bounds(await self.partition(topic, index), TIMEOUT_MS)).log_start_offset

    async def filled(self, topic: str, values: Sequence[bytes], *, partitions: int = 1, replicas: int = 1) -> int:
        """Creates a topic, fills its first partition through the proxy, and waits as `settled` does."""
        create_topic(self.kafka.bootstrap_servers, topic, partitions=partitions, replicas=replicas)
        await asyncio.to_thread(produce, self.bootstrap, topic, values)
        return await self.settled(topic)

    async def settled(self, topic: str, index: int = 0, *, is_decided: bool = True) -> int:
        """Waits until all records are copied and all but the newest segment are trimmed. Returns the local log start.

        If `is_decided` is false, an open transaction may hold back records."""
        partition = await self.partition(topic, index)
        async with asyncio.timeout(120):
            while True:
                bounds = await self.source.bounds(partition, TIMEOUT_MS)
                end = self.rlmm.state.remote_end_offset(partition)
                decided = bounds.high_watermark if is_decided else bounds.last_stable_offset
                if end is not None and end + 1 == decided == bounds.last_stable_offset:
                    newest = self.rlmm.state.remote_log_segment_metadata(partition, end)
                    if newest is not None and bounds.log_start_offset == newest.start_offset > 0:
                        return bounds.log_start_offset
                await asyncio.sleep(0.1)


class _TopicExistence(ClusterTopicExistence):
    """Ignores the metadata topic. The metadata is in memory, so brokers do not know the topic."""

    async def gone(self, topic_ids: Iterable[UUID], timeout_ms: int) -> set[UUID]:
        return await super().gone(set(topic_ids) - {IN_MEMORY_TOPIC_ID}, timeout_ms)


@asynccontextmanager
async def two_tiers(
    kafka: KafkaCluster,
    folder: Path,
    tiered: str,
    settings: FetchSettings | None = None,
    metadata_max_age: str = "500ms",
) -> AsyncIterator[TwoTiers]:
    """Yields a proxy. `tiered` is a topic name or a shell pattern.

    Deletes the topics at the end, since the next rig would copy them again. The timeouts are longer than by default,
    because not every test retries."""
    port = consecutive_free_ports(1 + len(kafka.brokers))
    config = parse_config(
        f"""
[upstream]
bootstrap.servers = "{kafka.bootstrap_servers}"
metadata.max.age.ms = "{metadata_max_age}"
[listener]
host = "127.0.0.1"
advertised.host = "127.0.0.1"
bootstrap.port = {port}
base.port = {port}
"""
    )
    settings = replace(settings or FetchSettings(), metadata_timeout_ms=TIMEOUT_MS, bounds_timeout_ms=TIMEOUT_MS)
    (folder / "remote").mkdir()
    storage = FaultyStorage(LocalRemoteStorageManager({"path": str(folder / "remote"), "cluster.id": "cluster"}))
    rlmm = InMemoryRemoteLogMetadataManager()
    reader_settings = RemoteLogReaderSettings(
        max_get_bytes=120_000, remote_log=RemoteLogConfig(chunk_cache_bytes=500_000)
    )
    async with AsyncExitStack() as stack:
        await storage.open()
        stack.push_async_callback(storage.close)
        proxy = one_worker(config, stack)
        reader = await stack.enter_async_context(RemoteLogReader(rlmm.log, storage, reader_settings))
        await proxy.open(stack)
        source = BrokerLogSource(proxy.client)
        tools = HandlerTools(
            topology=proxy.topology.topics,
            metadata=rlmm.log,
            bounds=LocalLogBoundsCache(source, monotonic_ms),
            source=source,
            reader=reader,
            settings=settings,
            clock_ms=monotonic_ms,
            spawn=proxy.server.spawn,
        )
        fetch = FetchHandler(tools)
        proxy.handlers[ApiKey.FETCH] = fetch
        proxy.handlers[ApiKey.LIST_OFFSETS] = ListOffsetsHandler(tools)
        proxy.handlers[ApiKey.OFFSET_FOR_LEADER_EPOCH] = OffsetForLeaderEpochHandler(tools)
        proxy.handlers[ApiKey.DELETE_RECORDS] = DeleteRecordsHandler(
            tools, rlmm, partial(require_aligned, source, rlmm.state)
        )
        guard = MetadataTopicGuard([], proxy.topology.topics.topic_name)
        proxy.handlers[ApiKey.DELETE_TOPICS] = DeleteTopicsHandler(guard, rlmm.log, rlmm)
        proxy.listen(stack)
        await proxy.topology.refresh()
        manager = _manager(proxy.client, source, storage, rlmm, folder, tiered)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(manager.run())
            yield TwoTiers(kafka, f"127.0.0.1:{port}", proxy.client, source, storage, rlmm, reader, fetch)
            manager.stop()
            await running
        await proxy.drain()
    await asyncio.to_thread(delete_topics, kafka.bootstrap_servers, tiered)


def _manager(
    client: BrokerClient,
    source: BrokerLogSource,
    storage: FaultyStorage,
    rlmm: InMemoryRemoteLogMetadataManager,
    folder: Path,
    tiered: str,
) -> RemoteLogManager:
    settings = RemoteLogManagerSettings(
        spool_dir=folder / "spool",
        fetch_bytes=20_000,
        remote_log=RemoteLogConfig(
            task_interval_ms=50,
            task_retry_backoff_ms=10,
            visible_after_ms=100,
        ),
    )
    metrics = RemoteLogManagerMetrics(CollectorRegistry())
    rule = TopicConfig(pattern=tiered, local_retention_bytes=0, segment_bytes=30_000, segment_ms=300)
    services = TaskServices(
        source=source,
        share_groups=ClusterShareGroups(client),
        storage=storage,
        metadata=rlmm,
        settings=settings,
        metrics=metrics,
        spool=Spool(settings.spool_dir, settings.spool_max_bytes, settings.spool_threads),
        cluster_id="cluster",
    )
    deletion = TopicDeletionTask(services, _TopicExistence(client))
    return RemoteLogManager(services, TieredTopics(client, [rule], metrics), deletion)
