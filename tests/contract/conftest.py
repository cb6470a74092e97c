"""The metadata logs of the contract tests: one on a real Kafka, the SQLite example, and two of the unit tests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.examples import install_example
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.metadata_topic import FakeMetadataTopic, FakeTopicMetadataManager
from tests.support.rigs.metadata_managers import TIMEOUT_MS, TopicBasedManager, bear_standstills
from tests.support.servers.kafka import KafkaCluster
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.config.managers import create_record_log
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.single_writer_log import SingleWriterLog
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.ids import TopicIdPartition

IMPLEMENTATIONS = ["in-memory", "following", "sqlite", pytest.param("topic-based", marks=pytest.mark.integration)]


@pytest.fixture(params=IMPLEMENTATIONS)
async def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RemoteLogMetadataManager]:
    bear_standstills(monkeypatch)
    async with AsyncExitStack() as stack:
        manager: RemoteLogMetadataManager
        match request.param:
            case "in-memory":
                manager = InMemoryRemoteLogMetadataManager()
            case "following":
                topic = FakeMetadataTopic(lambda: time.time_ns() // 1_000_000, owner="one")
                manager = FakeTopicMetadataManager(topic, "one", tmp_path, monotonic_ms)
            case "sqlite":
                install_example("sqlite-metadata", tmp_path / "site-packages")
                monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
                log = create_record_log("sqlite", {"path": str(tmp_path / "metadata.sqlite")})
                manager = RemoteLogMetadataManager(SingleWriterLog(log, tmp_path / "state", "c", None))
            case _:
                kafka: KafkaCluster = request.getfixturevalue("kafka")
                manager = await stack.enter_async_context(_topic_based(kafka, tmp_path))
        stack.push_async_callback(manager.log.close)
        await manager.log.open()
        yield manager


@asynccontextmanager
async def _topic_based(kafka: KafkaCluster, folder: Path) -> AsyncIterator[RemoteLogMetadataManager]:
    unique = f"rlmm-contract-{uuid4().hex[:8]}"
    client = BrokerClient([kafka.address()], client_id="test")
    try:
        topic = MetadataTopicSettings(unique, 3)
        yield TopicBasedManager(client, TopicBasedSettings(folder, topic=topic, write_timeout_ms=TIMEOUT_MS))
    finally:
        await client.close()


@pytest.fixture
async def partition(manager: RemoteLogMetadataManager) -> TopicIdPartition:
    partition = TopicIdPartition(uuid4(), 1, "orders")
    await until(lambda: manager.log.owns(partition))
    return partition
