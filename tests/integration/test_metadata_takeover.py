"""A metadata partition of which a dead proxy has left a transaction open: taken over, and written behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.contract.test_remote_log_metadata_manager import copied, segment, until
from tests.integration.test_topic_based_rlmm import TIMEOUT_MS, Cluster, user_partition
from tests.servers.kafka import KafkaCluster
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata import metadata_producer
from tiers.metadata.metadata_producer import TransactionalProducer, _batch
from tiers.metadata.serde import encode_key, encode_value, key_of
from tiers.metadata.tier_config_writer import tier_config_transactional_id
from tiers.metadata.topic_based import TopicBasedRemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import TopicTierConfigUpdate

pytestmark = pytest.mark.integration


async def dies_in_a_transaction(
    client: BrokerClient, reader: TopicBasedRemoteLogMetadataManager, partition: TopicIdPartition, name: str
) -> TransactionalProducer:
    number = reader.metadata_partition(partition)
    dead = TransactionalProducer(client, reader.topic, number, name, clock_ms=monotonic_ms)
    deadline_ms = monotonic_ms() + TIMEOUT_MS
    await dead.initialize(TIMEOUT_MS)
    await dead._add_partition(deadline_ms)
    update = TopicTierConfigUpdate(partition, "dead", 0, {"local.retention.ms": "5"})
    records: list[tuple[bytes, bytes | None]] = [(encode_key(key_of(update)), encode_value(update))]
    batch = _batch(records, dead._producer_id, dead._producer_epoch, 0)
    await dead._produce(number, batch, 1, name, deadline_ms)
    return dead


async def test_a_change_of_tier_settings_that_never_ended_holds_back_no_owner(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(kafka, tmp_path, topic_name)
    partition = user_partition()
    # Longer than anybody here waits.
    monkeypatch.setattr(metadata_producer, "TRANSACTION_TIMEOUT_MS", 300_000)
    async with cluster.manager("reader", is_member=False) as reader, cluster.client() as client:
        name = tier_config_transactional_id(cluster.settings("").group_id, reader.metadata_partition(partition))
        await dies_in_a_transaction(client, reader, partition, name)
    async with cluster.manager("owner") as owner:
        await until(lambda: owner.owns(partition))
        await copied(owner, segment(partition, 0, 9))
        assert owner.topic_tier_config(partition.topic_id) == {}


async def test_a_log_start_is_recorded_behind_it_for_whoever_has_the_patience(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(kafka, tmp_path, topic_name)
    partition = user_partition()
    monkeypatch.setattr(metadata_producer, "TRANSACTION_TIMEOUT_MS", 300_000)
    async with cluster.manager("reader", is_member=False) as reader, cluster.client() as client:
        dead = await dies_in_a_transaction(client, reader, partition, f"dead-{topic_name}")
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await reader.raise_log_start_offset(partition, 5, 100)
        async with asyncio.TaskGroup() as group:
            patient = group.create_task(reader.raise_log_start_offset(partition, 5, 60_000))
            with pytest.raises(RemoteLogMetadataNotReadyError):  # no longer than it wants to, behind whom it may be
                await reader.raise_log_start_offset(partition, 6, 100)
            assert not patient.done()
            await dead.initialize(TIMEOUT_MS)
        assert reader.log_start_offset(partition) == 5
