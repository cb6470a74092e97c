"""Copying continues after a leader dies, and the remote records are those that every replica has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import TopicWith, produce, random_values, topic_id_partition
from tiers.broker.client import BrokerClient
from tiers.broker.share_groups import ClusterShareGroups
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import TopicConfig
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition
from tiers.storage.local import LocalRemoteStorageManager
from tiers.tasks.copy.spool import Spool
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.remote_log_manager import RemoteLogManager
from tiers.tasks.task_services import RemoteLogManagerSettings, TaskServices
from tiers.tasks.tiered_topics import TieredTopics

pytestmark = pytest.mark.integration
TIMEOUT_MS = 60_000


@dataclass
class Copying:
    client: BrokerClient
    source: BrokerLogSource
    store: LocalRemoteStorageManager
    metadata: InMemoryRemoteLogMetadataManager

    async def until_remote(self, partition: TopicIdPartition, end_offset: int) -> None:
        async with asyncio.timeout(120):
            while True:
                if self.metadata.state.remote_end_offset(partition) == end_offset:
                    return
                await asyncio.sleep(0.05)

    async def remote_bytes(self, partition: TopicIdPartition) -> bytes:
        segments = self.metadata.state.list_remote_log_segments(partition)
        parts = [await self.store.fetch_log_segment(one, 0, one.segment_size_bytes) for one in segments]
        return b"".join(bytes(part) for part in parts)


@pytest.fixture
async def copying(kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path) -> AsyncIterator[Copying]:
    remote = tmp_path / "remote"
    remote.mkdir()
    async with AsyncExitStack() as stack:
        client = BrokerClient([kafka_of_three.address(node) for node in (1, 2, 3)], client_id="test")
        await client.open()
        stack.push_async_callback(client.close)
        store = LocalRemoteStorageManager({"path": str(remote), "cluster.id": "cluster"})
        await store.open()
        stack.push_async_callback(store.close)
        settings = RemoteLogManagerSettings(
            spool_dir=tmp_path / "spool",
            fetch_bytes=20_000,
            remote_log=RemoteLogConfig(task_interval_ms=50, task_retry_backoff_ms=20, visible_after_ms=1),
        )
        metrics = RemoteLogManagerMetrics(CollectorRegistry())
        services = TaskServices(
            source=BrokerLogSource(client),
            share_groups=ClusterShareGroups(client),
            storage=store,
            metadata=InMemoryRemoteLogMetadataManager(),
            settings=settings,
            metrics=metrics,
            spool=Spool(settings.spool_dir, settings.spool_max_bytes, 2),
            cluster_id="cluster",
        )
        rule = TopicConfig(pattern=topic_name, segment_bytes=50_000, segment_ms=500)
        manager = RemoteLogManager(services, TieredTopics(client, [rule], metrics))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(manager.run())
            metadata = services.metadata
            assert isinstance(metadata, InMemoryRemoteLogMetadataManager)
            yield Copying(client, BrokerLogSource(client), store, metadata)
            manager.stop()


async def test_a_leader_that_is_killed_costs_no_record(
    kafka_of_three: KafkaCluster, copying: Copying, topic_name: str, topic_with: TopicWith
) -> None:
    bootstrap = kafka_of_three.bootstrap_servers
    await asyncio.to_thread(topic_with, 200, replicas=3)
    partition = await topic_id_partition(copying.client, topic_name)
    leader = (await copying.client.leader_of(partition)).node_id
    await copying.until_remote(partition, 199)

    await asyncio.to_thread(kafka_of_three.kill_broker, leader)
    await asyncio.to_thread(produce, bootstrap, topic_name, random_values(200))
    await copying.until_remote(partition, 399)
    successor = await copying.client.leader_of(partition)
    log_file = kafka_of_three.log_folder(topic_name, 0, successor.node_id) / f"{0:020}.log"
    await asyncio.to_thread(kafka_of_three.start_broker, leader)

    assert successor.node_id != leader
    assert await copying.remote_bytes(partition) == log_file.read_bytes()
    epochs = [
        entry.epoch
        for segment in copying.metadata.state.list_remote_log_segments(partition)
        for entry in segment.segment_leader_epochs
    ]
    assert epochs == sorted(epochs)
    assert epochs[0] < epochs[-1] <= successor.leader_epoch
