"""Topics and records for tests that need a real Kafka, by librdkafka."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from uuid import UUID

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # they export it without saying so
from confluent_kafka.cimpl import NewTopic

from tiers.broker.client import BrokerClient
from tiers.model.ids import TopicIdPartition

TIMEOUT_S = 30.0


def create_topic(
    bootstrap: str, topic: str, *, partitions: int = 1, replicas: int = 1, config: Mapping[str, str] | None = None
) -> None:
    """Returns when every partition has a leader that answers for it: at first they say that they do not lead."""
    new = NewTopic(topic, num_partitions=partitions, replication_factor=replicas, config=dict(config or {}))
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([new])[topic].result(TIMEOUT_S)
    unknown = [TopicPartition(topic, partition) for partition in range(partitions)]
    deadline = time.monotonic() + TIMEOUT_S
    while unknown:
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # it has no annotations
        asked = admin.list_offsets(dict.fromkeys(unknown, latest))
        unknown = [partition for partition, answer in asked.items() if answer.exception(TIMEOUT_S) is not None]
        if unknown and time.monotonic() > deadline:
            raise TimeoutError(f"nobody leads {unknown[0]}")


def delete_topic(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(TIMEOUT_S)


def delete_topics(bootstrap: str, pattern: str) -> None:
    """Those whose name matches a shell pattern; returns when the cluster has taken it on."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    if names := fnmatch.filter(admin.list_topics(timeout=TIMEOUT_S).topics, pattern):
        wait(admin.delete_topics(names).values(), TIMEOUT_S)


def random_values(count: int, size: int = 1000) -> list[bytes]:
    """Values that do not compress."""
    return [os.urandom(size) for _ in range(count)]


def produce(
    bootstrap: str, topic: str, values: Iterable[bytes], *, partition: int = 0, records_per_batch: int = 10
) -> None:
    """Returns when all are acknowledged by all replicas in sync."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": 5,
            "batch.num.messages": records_per_batch,
            "enable.idempotence": True,
        }
    )
    _send(producer, topic, values, partition)
    producer.flush(TIMEOUT_S)


def produce_transaction(
    bootstrap: str, topic: str, values: Iterable[bytes], *, transactional_id: str, commit: bool, partition: int = 0
) -> None:
    producer = transactional_producer(bootstrap, transactional_id)
    producer.begin_transaction()
    _send(producer, topic, values, partition)
    producer.flush(TIMEOUT_S)
    if commit:
        producer.commit_transaction(TIMEOUT_S)
    else:
        producer.abort_transaction(TIMEOUT_S)


def transactional_producer(bootstrap: str, transactional_id: str) -> Producer:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": transactional_id, "linger.ms": 5})
    producer.init_transactions(TIMEOUT_S)
    return producer


def _send(producer: Producer, topic: str, values: Iterable[bytes], partition: int) -> None:
    for value in values:
        while True:
            try:
                producer.produce(topic, value, partition=partition)
                break
            except BufferError:
                producer.poll(0.1)


async def topic_id_partition(client: BrokerClient, topic: str, partition: int = 0) -> TopicIdPartition:
    """Waits for nothing: the topic must be known to the broker that answers."""
    metadata = await client.metadata(0)
    topic_id: UUID = metadata.topics[topic].topic_id
    return TopicIdPartition(topic_id, partition, topic)
