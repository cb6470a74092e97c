"""A broker changes its log by itself: it expires records before the copy, forgets a trim, or has a recreated topic."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from prometheus_client import CollectorRegistry

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.log_starts import user_log_start
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import (
    TopicWith,
    create_topic,
    delete_topic,
    produce,
    random_values,
    topic_id_partition,
)
from tests.support.tiers.workbench import POLICY, FakeShareGroups
from tiers.broker.client import BrokerClient
from tiers.config.settings import RemoteLogConfig
from tiers.errors import BrokerError, RetriableRemoteStorageError
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.log_history import kept_log_start
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.storage.local import LocalRemoteStorageManager
from tiers.tasks.copy.copy_attempts import CopyAttempts
from tiers.tasks.copy.copy_task import RLMCopyTask
from tiers.tasks.copy.spool import Spool
from tiers.tasks.deletion.segment_deletion import delete_attempts
from tiers.tasks.history.log_gap_task import LogGapTask
from tiers.tasks.history.stored_facts import FactsTask
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.retention.expiration_task import RLMExpirationTask
from tiers.tasks.retention.trim_task import TrimTask
from tiers.tasks.task_services import RemoteLogManagerSettings, TaskServices

pytestmark = pytest.mark.integration
TIMEOUT_MS = 300_000
MIB = 1 << 20


@dataclass
class Tasks:
    """The tasks of one partition on a real broker, with the metadata in memory."""

    services: TaskServices
    partition: TopicIdPartition
    registry: CollectorRegistry

    def __post_init__(self) -> None:
        self.policy = replace(
            POLICY,
            topic=self.partition.topic,
            topic_id=self.partition.topic_id,
            local_retention_bytes=0,
            segment_bytes=200_000,
            segment_ms=0,
        )
        self.facts = FactsTask(self.services, self.partition)
        self.attempts = CopyAttempts(self.services, self.partition)
        self.copying = RLMCopyTask(self.services, self.partition, self.attempts, self.facts)
        self.gaps = LogGapTask(self.services, self.partition, self.facts, self.attempts)

    async def bounds(self) -> LocalLogBounds:
        return await self.services.source.bounds(self.partition, TIMEOUT_MS)

    async def copy(self) -> None:
        """Runs copy rounds until no more records are ready."""
        while True:
            if not self.facts.is_proved:
                await self.facts.require_proved()
            bounds, log_start, remote_end = await self.bounds(), await self.log_start(), self.remote_end
            assert await self.gaps.make_known(bounds, log_start)
            has_announced = await self.attempts.announce_kept(log_start)
            await self.attempts.run(bounds, log_start)
            needless = await self.attempts.give_up(bounds, log_start)
            await delete_attempts(self.services, self.partition, needless)
            start = await self.gaps.copy_start(bounds, log_start)
            more = has_announced or self.remote_end != remote_end
            if start is not None and not has_announced:
                start = self.attempts.start_behind(start, is_urgent=False)
                more = await self.copying.run(self.policy, bounds, start) or more
            if not more:
                return

    async def log_start(self) -> int:
        services = self.services
        return await kept_log_start(services.source, services.metadata.state, self.partition, TIMEOUT_MS)

    async def trim(self) -> int | None:
        return await TrimTask(self.services, self.partition).run(self.policy)

    async def expire(self) -> None:
        task = RLMExpirationTask(self.services, self.partition)
        remote_end = self.services.metadata.state.remote_end_offset(self.partition)
        bounds, log_start = await self.bounds(), await self.log_start()
        await task.run(self.policy, bounds, log_start, self.copying.uncopied.at_least(), remote_end)

    async def until_start(self, holds: Callable[[int], bool]) -> int:
        async with asyncio.timeout(120):
            while not holds(start := (await self.bounds()).log_start_offset):  # noqa: ASYNC110  # a broker sets no event
                await asyncio.sleep(0.1)
        return start

    def alarms(self, reason: str) -> float:
        labels = {"topic": self.partition.topic, "reason": reason}
        return self.registry.get_sample_value("tidegate_remote_log_alarms_total", labels) or 0

    @property
    def remote_end(self) -> int | None:
        return self.services.metadata.state.remote_end_offset(self.partition)


@contextlib.asynccontextmanager
async def tasks_on(
    cluster: KafkaCluster, topic: str, folder: Path, checkpoint: Callable[[str], None] = lambda name: None
) -> AsyncIterator[Tasks]:
    (folder / "remote").mkdir()
    async with contextlib.AsyncExitStack() as stack:
        client = BrokerClient([cluster.address(each) for each in cluster.brokers], client_id="test")
        stack.push_async_callback(client.close)
        store = LocalRemoteStorageManager({"path": str(folder / "remote"), "cluster.id": "cluster"})
        await store.open()
        stack.push_async_callback(store.close)
        settings = RemoteLogManagerSettings(
            spool_dir=folder / "spool",
            fetch_bytes=100_000,
            gap_alarm_ms=1_000,
            remote_log=RemoteLogConfig(visible_after_ms=1),
        )
        registry = CollectorRegistry()
        services = TaskServices(
            source=BrokerLogSource(client),
            share_groups=FakeShareGroups(),
            storage=store,
            metadata=InMemoryRemoteLogMetadataManager(),
            settings=settings,
            metrics=RemoteLogManagerMetrics(registry),
            spool=Spool(settings.spool_dir, settings.spool_max_bytes, 1),
            cluster_id="cluster",
            checkpoint=checkpoint,
        )
        await services.spool.open()
        stack.callback(services.spool.close)
        tasks = Tasks(services, await topic_id_partition(client, topic), registry)
        yield tasks


async def test_records_that_expire_while_the_store_is_down_become_a_gap(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker deletes local files that are older than the total retention, remote or not
    (docs/founding.md, "Local deletion")."""
    bootstrap = kafka.bootstrap_servers
    config = {"retention.bytes": str(2 * MIB), "segment.bytes": str(MIB)}
    await asyncio.to_thread(create_topic, bootstrap, topic_name, config=config)
    async with tasks_on(kafka, topic_name, tmp_path) as tasks:
        await asyncio.to_thread(produce, bootstrap, topic_name, random_values(200))
        await tasks.copy()
        assert tasks.remote_end == 199

        async def down(*args: object) -> bytes | None:
            raise RetriableRemoteStorageError("503")

        with monkeypatch.context() as outage:
            outage.setattr(tasks.services.storage, "copy_log_segment_data", down)
            await asyncio.to_thread(produce, bootstrap, topic_name, random_values(5000))
            with contextlib.suppress(RetriableRemoteStorageError):  # the broker may have expired the records already
                await tasks.copy()
            await tasks.until_start(lambda start: start > 200)
        assert tasks.remote_end == 199

        # The owner records a gap only after a while, and the broker may expire more records meanwhile.
        async with asyncio.timeout(120):
            while tasks.remote_end != 5199:
                await tasks.copy()
        metadata = tasks.services.metadata
        [gap] = metadata.state.gaps(tasks.partition)
        # If the broker removed the records of the failed attempt, the copier has kept its segment, and copies it.
        assert 200 <= gap.first_offset < gap.next_offset <= (await tasks.bounds()).log_start_offset
        assert tasks.alarms("gap") == 1
        assert metadata.state.log_start_offset(tasks.partition) == 0
        for offset in (0, 199, gap.first_offset - 1, gap.next_offset):
            assert metadata.state.remote_log_segment_metadata(tasks.partition, offset) is not None


async def test_a_deletion_that_a_broker_forgot_is_repeated(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """Kafka checkpoints log starts once a minute, so records that were deleted before a crash may come back.

    The leader epochs of these records do not come back."""
    cluster = kafka_of_three
    await asyncio.to_thread(create_topic, cluster.bootstrap_servers, topic_name, config={"min.insync.replicas": "1"})
    listed = AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(topic_name, 300)
    (node_id,) = listed.topics[topic_name].partitions[0].replicas

    async def kill_broker() -> None:
        await asyncio.to_thread(cluster.kill_broker, node_id)
        await asyncio.to_thread(cluster.start_broker, node_id)

    await kill_broker()
    async with tasks_on(cluster, topic_name, tmp_path) as tasks:
        await asyncio.to_thread(produce, cluster.bootstrap_servers, topic_name, random_values(900))
        await tasks.copy()
        leader_epoch = (await tasks.bounds()).leader_epoch
        await tasks.services.metadata.put_log_start(tasks.partition, user_log_start(123, leader_epoch))
        await tasks.expire()
        assert (await tasks.bounds()).log_start_offset == 123
        trimmed = await tasks.trim()
        assert trimmed is not None
        assert 123 < trimmed < 900
        assert tasks.services.metadata.state.local_log_start(tasks.partition) == (trimmed, leader_epoch)

        await kill_broker()
        went_back = (await tasks.bounds()).log_start_offset
        assert went_back < 123
        await tasks.expire()
        assert (await tasks.bounds()).log_start_offset == 123
        assert await tasks.trim() == trimmed
        await tasks.copy()
        assert tasks.remote_end == 899
        assert tasks.alarms("gap") == 0


async def test_a_topic_that_was_recreated_before_the_trim_is_left_alone(
    kafka: KafkaCluster, topic_name: str, topic_with: TopicWith, tmp_path: Path
) -> None:
    bootstrap = kafka.bootstrap_servers

    def make_again(step: str) -> None:
        if step != "trim-decided":
            return
        delete_topic(bootstrap, topic_name)
        for _ in range(600):
            try:
                create_topic(bootstrap, topic_name)
            except KafkaException:
                continue  # some broker still has the old topic
            break
        produce(bootstrap, topic_name, random_values(900))

    await asyncio.to_thread(topic_with, 900)
    async with tasks_on(kafka, topic_name, tmp_path, make_again) as tasks:
        await tasks.copy()
        with pytest.raises(BrokerError):
            await tasks.trim()
        with pytest.raises(BrokerError):
            await tasks.copy()
        async with contextlib.AsyncExitStack() as stack:
            client = BrokerClient([kafka.address()], client_id="test")
            stack.push_async_callback(client.close)
            successor = await topic_id_partition(client, topic_name)
            assert successor.topic_id != tasks.partition.topic_id
            found = await BrokerLogSource(client).bounds(successor, TIMEOUT_MS)
            assert (found.log_start_offset, found.high_watermark) == (0, 900)
