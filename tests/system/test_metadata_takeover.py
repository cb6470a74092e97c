"""A new owner takes over a metadata partition with an open transaction, and writes behind it.

A dead proxy left the transaction open, or the coordinator has forgotten it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource

from tests.support.rigs.metadata_managers import (
    TIMEOUT_MS,
    Cluster,
    TopicBasedManager,
    bear_standstills,
    user_partition,
)
from tests.support.servers.kafka import KafkaCluster
from tests.support.tiers.segment_metadata import copied, segment
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import KeyAndValue, encode_key, encode_value, key_of
from tiers.metadata.topic.metadata_producer import TransactionalProducer, _batch
from tiers.metadata.topic.topic_appends import in_turn_transactional_id
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import TopicTierConfigUpdate

pytestmark = pytest.mark.integration


def tier_settings(partition: TopicIdPartition) -> KeyAndValue:
    update = TopicTierConfigUpdate(partition, "dead", 0, {"local.retention.ms": "5"})
    return encode_key(key_of(update)), encode_value(update)


async def dies_in_a_transaction(
    client: BrokerClient, reader: TopicBasedManager, partition: TopicIdPartition, name: str
) -> TransactionalProducer:
    number = reader.log.metadata_partition(partition)
    dead = TransactionalProducer(client, reader.log.topic, number, name)
    deadline_ms = monotonic_ms() + TIMEOUT_MS
    await dead.initialize(TIMEOUT_MS)
    await dead._add_partition(deadline_ms)
    batch = _batch([tier_settings(partition)], dead._producer_id, dead._producer_epoch, 0)
    await dead._produce(number, batch, 1, name, deadline_ms)
    return dead


@pytest.fixture
def unverified(kafka: KafkaCluster) -> Iterator[None]:
    """Lets the broker accept records of a transaction that its coordinator does not know."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})

    def configure(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry("transaction.partition.verification.enable", "false", incremental_operation=operation)
        (node_id,) = kafka.brokers
        broker = ConfigResource(ConfigResource.Type.BROKER, str(node_id), incremental_configs=[entry])
        admin.incremental_alter_configs([broker])[broker].result(TIMEOUT_MS / 1000)

    configure(AlterConfigOpType.SET)
    yield
    configure(AlterConfigOpType.DELETE)


class Forgotten(TransactionalProducer):
    """A producer whose coordinator has forgotten its writes, as that of Kafka 4.3 does without a leader."""

    async def _add_partition(self, deadline_ms: int) -> None:
        return


async def is_written(forgotten: Forgotten, partition: TopicIdPartition) -> bool:
    await forgotten.initialize(TIMEOUT_MS)
    with pytest.raises(RemoteLogMetadataError) as refused:
        await forgotten.commit([tier_settings(partition)], None, TIMEOUT_MS)
    return str(refused.value).startswith("EndTxn")  # the coordinator answers that there is no transaction to end


@pytest.mark.parametrize("of", ["owner", "tier-configs"])
async def test_a_transaction_that_its_coordinator_forgot_blocks_no_owner(
    kafka: KafkaCluster, unverified: None, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    cluster = Cluster(kafka, tmp_path, topic_name)
    partition = user_partition()
    bear_standstills(monkeypatch)
    async with cluster.manager("reader", is_member=False) as reader, cluster.client() as client:
        prefix, number = cluster.settings("").group_id, reader.log.metadata_partition(partition)
        name = f"{prefix}-{number}" if of == "owner" else in_turn_transactional_id(prefix, number)
        forgotten = Forgotten(client, reader.log.topic, number, name)
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            while not await is_written(forgotten, partition):  # the broker must learn its new setting first
                pass
        await forgotten.initialize(TIMEOUT_MS)
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await reader.log.ensure_fresh(partition, 0, 1_500)
    async with cluster.manager("owner") as owner:
        await until(lambda: owner.log.owns(partition))
        await copied(owner, segment(partition, 0, 9))
        assert owner.state.topic_tier_config(partition.topic_id) == {}


async def test_a_change_of_tier_settings_that_never_ended_holds_back_no_owner(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(kafka, tmp_path, topic_name)
    partition = user_partition()
    bear_standstills(monkeypatch)  # so the transaction lasts longer than every wait of this test
    async with cluster.manager("reader", is_member=False) as reader, cluster.client() as client:
        name = in_turn_transactional_id(cluster.settings("").group_id, reader.log.metadata_partition(partition))
        await dies_in_a_transaction(client, reader, partition, name)
    async with cluster.manager("owner") as owner:
        await until(lambda: owner.log.owns(partition))
        await copied(owner, segment(partition, 0, 9))
        assert owner.state.topic_tier_config(partition.topic_id) == {}


async def test_a_log_start_is_recorded_after_the_hanging_transaction(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(kafka, tmp_path, topic_name)
    partition = user_partition()
    bear_standstills(monkeypatch)
    async with cluster.manager("reader", is_member=False) as reader, cluster.client() as client:
        dead = await dies_in_a_transaction(client, reader, partition, f"dead-{topic_name}")
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await reader.put_log_start(partition, LogStart(5, 0, LogStartReason.USER), 100)
        async with asyncio.TaskGroup() as group:
            patient = group.create_task(reader.put_log_start(partition, LogStart(5, 0, LogStartReason.USER), 300_000))
            with pytest.raises(RemoteLogMetadataNotReadyError):  # it waits no longer than its timeout
                await reader.put_log_start(partition, LogStart(6, 0, LogStartReason.USER), 100)
            assert not patient.done()
            await dead.initialize(TIMEOUT_MS)
        assert reader.state.log_start_offset(partition) == 5
