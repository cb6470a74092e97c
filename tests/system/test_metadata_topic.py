"""The metadata topic in trouble: changed settings, a deletion, records of strangers, and an unexpected error."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from kafka.protocol.admin import (
    DeleteTopicsRequest,
    IncrementalAlterConfigsRequest,
)

from tests.support.rigs.metadata_managers import TopicBasedManager, bear_standstills
from tests.support.servers.kafka import KafkaCluster
from tests.support.tiers.segment_metadata import copied, segment, to
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient
from tiers.errors import OwnershipLostError, RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import encode_key, encode_value, key_of, segment_keys
from tiers.metadata.topic import topic_based
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings, open_metadata_topic
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState

pytestmark = pytest.mark.integration
TIMEOUT_MS = 300_000
TOPIC_RESOURCE = 2


@pytest.fixture(autouse=True)
def patient_members(monkeypatch: pytest.MonkeyPatch) -> None:
    bear_standstills(monkeypatch)


def addresses(kafka: KafkaCluster) -> list[tuple[str, int]]:
    return [kafka.address(node_id) for node_id in kafka.brokers]


def settings(folder: Path, topic_name: str) -> TopicBasedSettings:
    topic = MetadataTopicSettings(topic_name, 3)
    return TopicBasedSettings(folder, topic=topic, open_timeout_ms=TIMEOUT_MS)


class Owner(NamedTuple):
    client: BrokerClient
    manager: TopicBasedManager
    partition: TopicIdPartition


@asynccontextmanager
async def owner(kafka: KafkaCluster, wanted: TopicBasedSettings) -> AsyncIterator[Owner]:
    """Yields the owner of the metadata partition that `partition` hashes to."""
    client = BrokerClient(addresses(kafka), client_id="test")
    manager = TopicBasedManager(client, wanted)
    partition = TopicIdPartition(uuid4(), 0, "orders")
    try:
        await manager.log.open()
        await until(lambda: manager.log.owns(partition))
        yield Owner(client, manager, partition)
    finally:
        await manager.log.close()
        await client.close()


async def set_cleanup_policy(client: BrokerClient, topic_name: str, policy: str) -> None:
    request = IncrementalAlterConfigsRequest
    config = request.AlterConfigsResource.AlterableConfig(name="cleanup.policy", config_operation=0, value=policy)
    resource = request.AlterConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=topic_name, configs=[config])
    response = await client.request(None, request(resources=[resource], validate_only=False), TIMEOUT_MS)
    assert response.responses[0].error_code == 0


async def test_a_policy_that_loses_records_stops_the_owner(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    watching = replace(settings(tmp_path, topic_name), check_interval_ms=100)
    async with owner(kafka, watching) as (client, manager, partition):
        await set_cleanup_policy(client, topic_name, "compact,delete")
        await until(lambda: manager.log.status().alarm is not None)
        assert "cleanup.policy=compact,delete" in str(manager.log.status().alarm)
        assert not manager.log.owns(partition)
        with pytest.raises(OwnershipLostError):
            await manager.add_remote_log_segment_metadata(segment(partition, 0, 9))
        await set_cleanup_policy(client, topic_name, "compact")
        await until(lambda: manager.log.status().alarm is None and manager.log.owns(partition))
        await copied(manager, segment(partition, 0, 9))


async def delete(client: BrokerClient, topic_name: str) -> None:
    message = DeleteTopicsRequest(topic_names=[topic_name], timeout_ms=TIMEOUT_MS)
    response = await client.request(None, message, TIMEOUT_MS, max_version=5)
    assert response.responses[0].error_code == 0


async def until_gone(client: BrokerClient, topic_name: str) -> None:
    async with asyncio.timeout(TIMEOUT_MS / 1000):
        while topic_name in (await client.metadata(TIMEOUT_MS)).topics:  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.05)


async def test_a_deleted_topic_is_an_alarm_and_its_replacement_is_foreign(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    mine = replace(settings(tmp_path, topic_name), check_interval_ms=100)
    async with owner(kafka, mine) as (client, manager, partition):
        await copied(manager, segment(partition, 0, 9))
        await delete(client, topic_name)
        await until(lambda: manager.log.status().alarm is not None)
        assert "was deleted" in str(manager.log.status().alarm)
        assert manager.state.is_final()
        assert not manager.log.owns(partition)
        assert manager.state.remote_end_offset(partition) == 9

        await open_metadata_topic(client, mine.topic, TIMEOUT_MS)
        await until(lambda: "created again" in str(manager.log.status().alarm))
        assert not manager.log.owns(partition)
        with pytest.raises(OwnershipLostError):
            await manager.add_remote_log_segment_metadata(segment(partition, 10, 19))
        assert manager.state.remote_end_offset(partition) == 9

        # A restart accepts neither the new topic nor, when that is gone too, an empty topic in place of the lost one.
        for what_is_there in ("is not the one", "there is no topic"):
            await manager.log.close()
            await manager.log.open()
            assert what_is_there in str(manager.log.status().alarm)
            assert str(mine.state_folder) in str(manager.log.status().alarm)
            assert manager.state.is_final()
            assert manager.state.remote_end_offset(partition) == 9
            assert not manager.log.owns(partition)
            with pytest.raises(RemoteLogMetadataNotReadyError):
                await manager.log.ensure_fresh(partition, 60_000, 100)
            with pytest.raises(RemoteLogMetadataError):
                await manager.put_log_start(partition, LogStart(5, 0, LogStartReason.USER), 100)
            if what_is_there == "is not the one":
                await delete(client, topic_name)
                await until_gone(client, topic_name)
        assert topic_name not in (await client.metadata(TIMEOUT_MS)).topics

        # An operator accepts that the topic is lost for good.
        await manager.log.close()
        shutil.rmtree(mine.state_folder)
        await manager.log.open()
        assert manager.state.remote_end_offset(partition) is None
        assert manager.log.status().alarm is None
        assert not manager.state.is_final()
        await manager.log.ensure_fresh(partition, 60_000, TIMEOUT_MS)


async def test_records_of_strangers_harm_nothing(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The records are arbitrary bytes, and records of a segment that only an owner may write."""
    client = BrokerClient(addresses(kafka), client_id="test")
    partition, victim = TopicIdPartition(uuid4(), 0, "orders"), TopicIdPartition(uuid4(), 0, "victim")
    forged = segment(victim, 0, 9)
    finished = to(forged, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)

    def foreign(mine: RemoteLogSegmentMetadata) -> list[tuple[bytes, bytes | None]]:
        return [
            (b"?", b"not a record of ours"),
            (b"?", b""),
            (b"?", None),
            (encode_key(key_of(forged)), encode_value(forged)),
            (encode_key(key_of(finished)), encode_value(finished)),
            (encode_key(key_of(finished)), encode_value(finished)[:-1]),
            (encode_key(segment_keys(mine.segment_id)[0]), None),
        ]

    def produce(records: list[tuple[bytes, bytes | None]], compression: str) -> None:
        own: dict[str, str | int | float | bool] = {"compression.type": compression}
        own["enable.idempotence"] = True  # a record that is sent again is not stored twice
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, **own})
        for number in range(3):
            for key, value in [*records, (b"?", bytes.fromhex("01b71700"))]:
                producer.produce(topic_name, value, key, partition=number)
        assert producer.flush(TIMEOUT_MS / 1000) == 0

    manager = TopicBasedManager(client, settings(tmp_path / "one", topic_name))
    fresh = TopicBasedManager(client, replace(settings(tmp_path / "two", topic_name), is_member=False))
    try:
        await manager.log.open()
        await until(lambda: manager.log.owns(partition))
        mine = await copied(manager, segment(partition, 0, 9))
        records = foreign(mine)
        for compression in ("none", "gzip"):
            await asyncio.to_thread(produce, records, compression)
        await copied(manager, segment(partition, 10, 19))
        await manager.log.ensure_fresh(victim, 0, TIMEOUT_MS)
        await until(lambda: manager.log.status().foreign_records_read == 3 * 2 * len(records))
        caplog.clear()
        await fresh.log.open()
        await until(lambda: fresh.log.status().foreign_records_read == 3 * 2 * len(records))
        lines = [line for line in caplog.records if "foreign records" in line.message]
        assert len(lines) < len(records) * 2
        assert sum(vars(line)["records"] for line in lines) == 3 * 2 * len(records)
        await fresh.log.ensure_fresh(partition, 0, TIMEOUT_MS)
        for each in (manager, fresh):
            assert each.log.status().alarm is None
            assert not each.state.is_tiered(victim.topic_id)
            assert [held.end_offset for held in each.state.list_remote_log_segments(partition)] == [9, 19]
        assert manager.log.owns(partition)
    finally:
        await fresh.log.close()
        await manager.log.close()
        await client.close()


async def test_an_unexpected_error_is_an_alarm_and_ends_no_other_task(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*args: object) -> None:
        raise ZeroDivisionError

    watching = replace(settings(tmp_path, topic_name), check_interval_ms=100)
    async with owner(kafka, watching) as (_, manager, partition):
        monkeypatch.setattr(topic_based, "check_metadata_topic", breaks)
        await until(lambda: manager.log.status().alarm is not None)
        assert "ZeroDivisionError" in str(manager.log.status().alarm)
        assert not manager.log.owns(partition)
        await manager.log.ensure_fresh(partition, 0, TIMEOUT_MS)
