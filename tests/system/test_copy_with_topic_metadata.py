"""Copy, trim, expiry and topic deletion on a real cluster, with the metadata in the cluster itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.rigs.metadata_managers import TopicBasedManager
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import (
    TopicWith,
    delete_topic,
    topic_id_partition,
)
from tiers.broker.client import BrokerClient
from tiers.broker.share_groups import ClusterShareGroups
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import TopicConfig
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.ids import TopicIdPartition
from tiers.storage.local import LocalRemoteStorageManager
from tiers.tasks.copy.spool import Spool
from tiers.tasks.deletion.topic_deletion import ClusterTopicExistence, TopicDeletionTask
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.remote_log_manager import RemoteLogManager
from tiers.tasks.task_services import RemoteLogManagerSettings, TaskServices
from tiers.tasks.tiered_topics import TieredTopics

pytestmark = pytest.mark.integration
TIMEOUT_MS = 300_000


@dataclass
class Process:
    """The parts of a remote-log process."""

    client: BrokerClient
    source: BrokerLogSource
    metadata: TopicBasedManager
    remote: Path
    manager: RemoteLogManager

    async def log_start(self, partition: TopicIdPartition) -> int:
        return (await self.source.bounds(partition, TIMEOUT_MS)).log_start_offset

    def objects(self) -> list[Path]:
        """Returns the files of the store, without the marker and those of objects that are being written."""
        files = [path for path in self.remote.rglob("*") if path.is_file() and ".tmp" not in path.parts]
        return [path for path in files if path.name != "tier.json"]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


@pytest.fixture
async def process(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> AsyncIterator[Process]:
    remote = tmp_path / "remote"
    remote.mkdir()
    async with AsyncExitStack() as stack:
        client = BrokerClient([kafka.address()], client_id="test")
        await client.open()
        stack.push_async_callback(client.close)
        store = LocalRemoteStorageManager({"path": str(remote), "cluster.id": "cluster"})
        await store.open()
        stack.push_async_callback(store.close)
        topic = MetadataTopicSettings(name=f"__metadata_{topic_name[-8:]}", partition_count=2)
        remote_log = RemoteLogConfig(
            task_interval_ms=100, task_retry_backoff_ms=20, visible_after_ms=300, topic_deletion_delay_ms=500
        )
        metadata = TopicBasedManager(
            client,
            TopicBasedSettings(
                tmp_path / "state",
                topic=topic,
                open_timeout_ms=TIMEOUT_MS,
                max_age_ms=remote_log.fresh_within_ms,
            ),
        )
        await metadata.log.open()
        stack.push_async_callback(metadata.log.close)
        settings = RemoteLogManagerSettings(spool_dir=tmp_path / "spool", remote_log=remote_log)
        source, metrics = BrokerLogSource(client), RemoteLogManagerMetrics(CollectorRegistry())
        services = TaskServices(
            source=source,
            share_groups=ClusterShareGroups(client),
            storage=store,
            metadata=metadata,
            settings=settings,
            metrics=metrics,
            spool=Spool(settings.spool_dir, settings.spool_max_bytes, 2),
            cluster_id="cluster",
        )
        rule = TopicConfig(pattern=topic_name, local_retention_bytes=0, segment_bytes=30_000, segment_ms=300)
        manager = RemoteLogManager(
            services,
            TieredTopics(client, [rule], metrics),
            TopicDeletionTask(services, ClusterTopicExistence(client)),
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(manager.run())
            yield Process(client, source, metadata, remote, manager)
            manager.stop()


async def test_copy_trim_and_delete_with_metadata_in_the_cluster(
    kafka: KafkaCluster, process: Process, topic_name: str, topic_with: TopicWith
) -> None:
    topic_with(100)
    partition = await topic_id_partition(process.client, topic_name)

    async def all_is_remote() -> bool:
        return process.metadata.state.remote_end_offset(partition) == 99

    async def only_the_newest_segment_is_local() -> bool:
        newest = process.metadata.state.remote_log_segment_metadata(partition, 99)
        return newest is not None and await process.log_start(partition) == newest.start_offset > 0

    async def nothing_is_left() -> bool:
        return process.objects() == [] and partition not in process.metadata.state.partitions()

    await eventually(all_is_remote)
    await eventually(only_the_newest_segment_is_local)
    segments = list(process.metadata.state.list_remote_log_segments(partition))
    assert [one.start_offset for one in segments] == [0, *(one.end_offset + 1 for one in segments[:-1])]
    assert process.metadata.state.log_start_offset(partition) == 0
    assert len([each for each in process.objects() if each.suffix != ".facts"]) == 2 * len(segments)

    async def is_missing() -> bool:
        return partition.topic_id in process.metadata.state.missing_topics()

    async def nothing_is_recorded() -> bool:
        return not process.metadata.state.missing_topics() and not process.metadata.state.topic_deletions()

    objects = process.objects()
    delete_topic(kafka.bootstrap_servers, topic_name)
    await eventually(is_missing)
    assert process.objects() == objects
    await process.metadata.put_topic_deletion(partition.topic_id, topic_name, is_confirmed=True)
    await eventually(nothing_is_left)
    await eventually(nothing_is_recorded)


async def test_the_users_retention_holds_over_both_tiers(
    kafka: KafkaCluster, process: Process, topic_name: str, topic_with: TopicWith
) -> None:
    topic_with(100, config={"retention.bytes": "50000"})
    partition = await topic_id_partition(process.client, topic_name)

    async def the_head_is_gone() -> bool:
        """Whether the head is deleted in the store and on the broker, not only for readers."""
        start = min((one.start_offset for one in process.metadata.state.list_remote_log_segments(partition)), default=0)
        is_all_remote = process.metadata.state.remote_end_offset(partition) == 99
        return is_all_remote and start >= 40 and await process.log_start(partition) >= start

    await eventually(the_head_is_gone)
    segments = list(process.metadata.state.list_remote_log_segments(partition))
    assert sum(one.segment_size_bytes for one in segments) >= 50_000
    assert process.metadata.state.log_start_offset(partition) == segments[0].start_offset
    assert len([each for each in process.objects() if each.suffix != ".facts"]) == 2 * len(segments)
