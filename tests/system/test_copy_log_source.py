"""The guarantees of `BrokerLogSource` for a copier, against a real broker."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from protocol.errors import ErrorCode
from protocol.records.record_batch import verify_batches
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import (
    create_topic,
    delete_topic,
    filled_topic,
    produce,
    produce_transaction,
    random_values,
    topic_id_partition,
    transactional_producer,
)
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError, LogDivergedError, OffsetGapError
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds

pytestmark = pytest.mark.integration
TIMEOUT_MS = 300_000


def still_ours() -> None:
    """The check of an owner that never loses its ownership."""


async def filled(
    kafka: KafkaCluster, client: BrokerClient, topic: str, count: int
) -> tuple[BrokerLogSource, TopicIdPartition, int]:
    """Creates a topic with `count` records. Returns its source, its partition and its leader epoch."""
    filled_topic(kafka.bootstrap_servers, topic, count)
    partition = await topic_id_partition(client, topic)
    source = BrokerLogSource(client)
    return source, partition, (await source.bounds(partition, TIMEOUT_MS)).leader_epoch


async def test_the_log_is_read_as_it_lies_in_the_broker_folder(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str
) -> None:
    source, partition, _ = await filled(kafka, client, topic_name, 200)

    bounds = await source.bounds(partition, TIMEOUT_MS)
    log = b""
    offset = 0
    while offset < bounds.last_stable_offset:
        read = await source.read(partition, offset, 30_000, TIMEOUT_MS)
        assert 0 < len(read.records) <= 30_000
        log += read.records
        offset = verify_batches(read.records)[-1].next_offset

    assert (bounds.log_start_offset, bounds.last_stable_offset, bounds.high_watermark) == (0, 200, 200)
    assert offset == 200
    assert log == (kafka.log_folder(topic_name, 0) / f"{0:020}.log").read_bytes()
    assert (await source.read(partition, 200, 30_000, TIMEOUT_MS)).records == b""


async def test_a_trim_moves_the_log_start_and_what_lies_below_is_a_gap(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str
) -> None:
    source, partition, epoch = await filled(kafka, client, topic_name, 50)

    assert await source.delete_records(partition, 30, epoch, TIMEOUT_MS, still_ours) == 30
    assert (await source.bounds(partition, TIMEOUT_MS)).log_start_offset == 30
    assert await source.delete_records(partition, 20, epoch, TIMEOUT_MS, still_ours) == 30
    with pytest.raises(OffsetGapError):
        await source.read(partition, 29, 1000, TIMEOUT_MS)
    with pytest.raises(LogDivergedError):
        await source.read(partition, 51, 1000, TIMEOUT_MS)
    assert await source.end_offset_for_epoch(partition, epoch, TIMEOUT_MS) == EpochEndOffset(epoch, 50)


async def test_bounds_of_logs_that_are_empty_trimmed_or_held_back(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name, partitions=3)
    for number in (1, 2):
        produce(kafka.bootstrap_servers, topic_name, random_values(50), partition=number, records_per_batch=5)
    source = BrokerLogSource(client)
    empty, trimmed, held = [await topic_id_partition(client, topic_name, number) for number in range(3)]
    await source.delete_records(trimmed, 50, 0, TIMEOUT_MS, still_ours)
    producer = transactional_producer(kafka.bootstrap_servers, topic_name)
    producer.begin_transaction()
    producer.produce(topic_name, b"open", partition=2)
    assert producer.flush(TIMEOUT_MS / 1000) == 0
    found = await asyncio.gather(*(source.bounds(one, TIMEOUT_MS) for one in (empty, trimmed, held)))
    producer.abort_transaction(TIMEOUT_MS / 1000)
    assert found == [
        LocalLogBounds(log_start_offset=0, last_stable_offset=0, high_watermark=0, leader_epoch=0),
        LocalLogBounds(log_start_offset=50, last_stable_offset=50, high_watermark=50, leader_epoch=0),
        LocalLogBounds(log_start_offset=0, last_stable_offset=50, high_watermark=51, leader_epoch=0),
    ]


@pytest.mark.parametrize("offset", [51, 1 << 40])
async def test_nothing_is_trimmed_past_the_end(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str, offset: int
) -> None:
    source, partition, epoch = await filled(kafka, client, topic_name, 50)
    with pytest.raises(BrokerError) as error:
        await source.delete_records(partition, offset, epoch, TIMEOUT_MS, still_ours)
    assert not error.value.retriable
    assert (await source.bounds(partition, TIMEOUT_MS)).log_start_offset == 0


async def test_nothing_is_trimmed_in_another_leader_epoch_or_topic(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str
) -> None:
    source, partition, epoch = await filled(kafka, client, topic_name, 50)

    with pytest.raises(BrokerError) as other_epoch:
        await source.delete_records(partition, 30, epoch + 1, TIMEOUT_MS, still_ours)
    with pytest.raises(BrokerError) as other_topic:
        await source.delete_records(TopicIdPartition(UUID(int=99), 0, topic_name), 30, epoch, TIMEOUT_MS, still_ours)

    assert other_epoch.value.code == ErrorCode.FENCED_LEADER_EPOCH
    assert other_topic.value.code == ErrorCode.UNKNOWN_TOPIC_ID
    assert (await source.bounds(partition, TIMEOUT_MS)).log_start_offset == 0


async def test_a_recreated_topic_is_another_topic(kafka: KafkaCluster, client: BrokerClient, topic_name: str) -> None:
    source, old, epoch = await filled(kafka, client, topic_name, 10)
    delete_topic(kafka.bootstrap_servers, topic_name)
    create_topic(kafka.bootstrap_servers, topic_name)
    produce(kafka.bootstrap_servers, topic_name, random_values(10))

    with pytest.raises(BrokerError) as read:
        await source.read(old, 0, 1000, TIMEOUT_MS)
    with pytest.raises(BrokerError) as trim:
        await source.delete_records(old, 5, epoch, TIMEOUT_MS, still_ours)

    assert read.value.code == trim.value.code == ErrorCode.UNKNOWN_TOPIC_ID
    new = await topic_id_partition(client, topic_name)
    assert (await source.bounds(new, TIMEOUT_MS)).log_start_offset == 0


async def test_an_open_transaction_holds_reads_and_trims_back(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    produce_transaction(
        kafka.bootstrap_servers, topic_name, random_values(5), transactional_id=f"{topic_name}-a", commit=False
    )
    open_one = transactional_producer(kafka.bootstrap_servers, f"{topic_name}-b")
    open_one.begin_transaction()
    open_one.produce(topic_name, b"undecided", partition=0)
    assert open_one.flush(TIMEOUT_MS / 1000) == 0
    produce(kafka.bootstrap_servers, topic_name, [b"after"])
    partition = await topic_id_partition(client, topic_name)
    source = BrokerLogSource(client)

    bounds = await source.bounds(partition, TIMEOUT_MS)
    read = await source.read(partition, 0, 1 << 20, TIMEOUT_MS)
    assert (bounds.last_stable_offset, bounds.high_watermark) == (6, 8)
    assert verify_batches(read.records)[-1].last_offset == 5
    assert [aborted.first_offset for aborted in read.aborted_transactions] == [0]
    with pytest.raises(BrokerError):
        await source.delete_records(partition, 7, bounds.leader_epoch, TIMEOUT_MS, still_ours)
    open_one.commit_transaction(TIMEOUT_MS / 1000)
    assert (await source.bounds(partition, TIMEOUT_MS)).log_start_offset == 0
