"""Metadata managers on a real broker, each on a metadata topic that belongs to one test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import TRANSACTION_TIMEOUT_MS
from tiers.broker.client import BrokerClient
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.topic import metadata_producer
from tiers.metadata.topic.group import membership, ownership
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.model.ids import TopicIdPartition

TIMEOUT_MS = 60_000
PARTITIONS = 4


def bear_standstills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tests tolerate pauses of the machine: neither members nor transactions time out."""
    monkeypatch.setattr(ownership, "CONFIRMATION_MAX_AGE_MS", TIMEOUT_MS)
    monkeypatch.setattr(membership, "_SESSION_TIMEOUT_MS", TIMEOUT_MS)
    monkeypatch.setattr(metadata_producer, "TRANSACTION_TIMEOUT_MS", TRANSACTION_TIMEOUT_MS)


class TopicBasedManager(RemoteLogMetadataManager):
    """The product's manager over the metadata topic."""

    log: TopicBasedMetadataLog

    def __init__(self, client: BrokerClient, settings: TopicBasedSettings) -> None:
        super().__init__(TopicBasedMetadataLog(client, settings))


class Cluster:
    """Opens managers that share one metadata topic, which belongs to this test."""

    def __init__(self, kafka: KafkaCluster, folder: Path, topic_name: str) -> None:
        self.kafka = kafka
        self.folder = folder
        self.topic = MetadataTopicSettings(topic_name, PARTITIONS)

    def settings(self, name: str) -> TopicBasedSettings:
        return TopicBasedSettings(self.folder / name, topic=self.topic, write_timeout_ms=TIMEOUT_MS)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[BrokerClient]:
        client = BrokerClient([self.kafka.address()], client_id="test")
        try:
            yield client
        finally:
            await client.close()

    @contextlib.asynccontextmanager
    async def manager(self, name: str, *, is_member: bool = True) -> AsyncIterator[TopicBasedManager]:
        async with self.client() as client:
            settings = replace(self.settings(name), is_member=is_member)
            manager = TopicBasedManager(client, settings)
            try:
                await manager.log.open()
                yield manager
            finally:
                await manager.log.close()


def user_partition() -> TopicIdPartition:
    return TopicIdPartition(uuid4(), 0, "orders")
