"""Creates topics and produces records with librdkafka, for tests with a real Kafka."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from uuid import UUID

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # they export it without saying so
from confluent_kafka.cimpl import NewPartitions, NewTopic
from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from tests.support.servers.peer import Peer
from tiers.broker.client import BrokerClient
from tiers.model.ids import TopicIdPartition

TIMEOUT_S = 300.0
TRANSACTION_TIMEOUT_MS = 900_000
"""The longest timeout that a broker accepts. By default a broker aborts a transaction that is open for a minute."""


def create_topic(
    bootstrap: str, topic: str, *, partitions: int = 1, replicas: int = 1, config: Mapping[str, str] | None = None
) -> None:
    """Creates a topic. Returns when every partition has a leader that answers, and every broker knows the topic.

    At first, leaders answer that they do not lead, and other brokers answer that the topic does not exist."""
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
    while not all(known := _known(admin, topic)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{known.count(False)} brokers do not know {topic}")
        time.sleep(0.05)


def _known(admin: AdminClient, topic: str) -> list[bool]:
    """Returns for each broker whether it knows the topic. Brokers learn of a topic at different times."""
    brokers = admin.list_topics(timeout=TIMEOUT_S).brokers.values()
    return [_knows((str(broker.host), broker.port), topic) for broker in brokers]


def _knows(broker: tuple[str, int], topic: str) -> bool:
    asked = MetadataRequest.MetadataRequestTopic(name=topic)
    try:
        with Peer(broker) as peer:
            (answer,) = peer.ask(MetadataRequest(topics=[asked], allow_auto_topic_creation=False), 4).topics
    except OSError:  # the broker is gone; the other brokers stop naming it
        return False
    return bool(answer.error_code == ErrorCode.NONE)


def delete_topic(bootstrap: str, topic: str) -> None:
    """Deletes a topic. Returns when no broker names it any more.

    A broker still names the topic for a moment after the controller has answered."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while any(_known(admin, topic)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"a broker still names the topic {topic}")
        time.sleep(0.05)


def add_partitions(bootstrap: str, topic: str, count: int) -> None:
    """Adds partitions, up to `count` in total. Returns when every broker knows them.

    A producer gives up a partition for good if a broker does not know it yet."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_partitions([NewPartitions(topic, count)])[topic].result(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    brokers = admin.list_topics(timeout=TIMEOUT_S).brokers.values()
    while any(_partition_count((str(broker.host), broker.port), topic) != count for broker in brokers):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not every broker knows {count} partitions of {topic}")
        time.sleep(0.05)


def _partition_count(broker: tuple[str, int], topic: str) -> int:
    asked = MetadataRequest.MetadataRequestTopic(name=topic)
    with Peer(broker) as peer:
        (answer,) = peer.ask(MetadataRequest(topics=[asked], allow_auto_topic_creation=False), 4).topics
    return len(answer.partitions)


def delete_topics(bootstrap: str, pattern: str) -> None:
    """Deletes the topics whose names match a shell pattern. Returns when the controller has accepted the deletion."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    if names := fnmatch.filter(admin.list_topics(timeout=TIMEOUT_S).topics, pattern):
        wait(admin.delete_topics(names).values(), TIMEOUT_S)


def random_values(count: int, size: int = 1000) -> list[bytes]:
    """Returns values that do not compress."""
    return [os.urandom(size) for _ in range(count)]


def produce(
    bootstrap: str, topic: str, values: Iterable[bytes], *, partition: int = 0, records_per_batch: int = 10
) -> None:
    """Produces the values. Returns when all in-sync replicas have acknowledged them."""
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
    _flush(producer, topic)


def filled_topic(
    bootstrap: str,
    topic: str,
    records: int | Sequence[bytes],
    *,
    partitions: int = 1,
    replicas: int = 1,
    config: Mapping[str, str] | None = None,
) -> list[bytes]:
    """Creates a topic, and fills its first partition with these values or this number of random ones. Returns them."""
    values = random_values(records) if isinstance(records, int) else list(records)
    create_topic(bootstrap, topic, partitions=partitions, replicas=replicas, config=config)
    produce(bootstrap, topic, values)
    return values


@dataclass(frozen=True)
class TopicWith:
    """Fills one topic of one cluster."""

    bootstrap: str
    topic: str

    def __call__(
        self,
        records: int | Sequence[bytes],
        *,
        partitions: int = 1,
        replicas: int = 1,
        config: Mapping[str, str] | None = None,
    ) -> list[bytes]:
        return filled_topic(
            self.bootstrap, self.topic, records, partitions=partitions, replicas=replicas, config=config
        )


def produce_transaction(
    bootstrap: str, topic: str, values: Iterable[bytes], *, transactional_id: str, commit: bool, partition: int = 0
) -> None:
    """Produces the values in a transaction. Returns when the transaction has ended.

    No other transaction of the partition may be open."""
    producer = transactional_producer(bootstrap, transactional_id)
    producer.begin_transaction()
    _send(producer, topic, values, partition)
    _flush(producer, topic)
    if commit:
        producer.commit_transaction(TIMEOUT_S)
    else:
        producer.abort_transaction(TIMEOUT_S)
    until_decided(bootstrap, topic, partition)


def until_decided(bootstrap: str, topic: str, partition: int = 0) -> None:
    """Returns when no transaction of the partition is open any more, and the last marker has its offset.

    The coordinator answers the producer as soon as it has decided the transaction. It writes the markers later."""
    at = TopicPartition(topic, partition)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    deadline = time.monotonic() + TIMEOUT_S
    while (whole := _end_offset(admin, at, IsolationLevel.READ_UNCOMMITTED)) != (
        decided := _end_offset(admin, at, IsolationLevel.READ_COMMITTED)
    ):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{topic} ends at {whole}, and a transaction is open at {decided}")
        time.sleep(0.01)


def until_end(bootstrap: str, topic: str, offset: int, partition: int = 0) -> None:
    """Returns when the log ends at `offset`. Use it to wait for a marker while other transactions are open."""
    at = TopicPartition(topic, partition)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    deadline = time.monotonic() + TIMEOUT_S
    while (end := _end_offset(admin, at, IsolationLevel.READ_UNCOMMITTED)) != offset:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{topic} ends at {end}, not at {offset}")
        time.sleep(0.01)


def _end_offset(admin: AdminClient, at: TopicPartition, isolation_level: IsolationLevel) -> int:
    latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # it has no annotations
    return int(admin.list_offsets({at: latest}, isolation_level=isolation_level)[at].result(TIMEOUT_S).offset)


def transactional_producer(bootstrap: str, transactional_id: str) -> Producer:
    """Returns a producer whose transactions stay open long enough for a test on a busy machine."""
    settings: dict[str, str | int | float | bool] = {"transactional.id": transactional_id, "linger.ms": 5}
    producer = Producer({"bootstrap.servers": bootstrap, "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS, **settings})
    producer.init_transactions(TIMEOUT_S)
    return producer


def _send(producer: Producer, topic: str, values: Iterable[bytes], partition: int) -> None:
    for value in values:
        while True:
            try:
                producer.produce(topic, value, partition=partition, on_delivery=_raise_refusal)
                break
            except BufferError:
                producer.poll(0.1)


def _raise_refusal(error: KafkaError | None, _: Message) -> None:
    """A delivery callback. Raises the error in the thread that polls or flushes."""
    if error is not None:
        raise KafkaException(error)


def _flush(producer: Producer, topic: str) -> None:
    if left := producer.flush(TIMEOUT_S):
        raise TimeoutError(f"{left} records of {topic} are not acknowledged after {TIMEOUT_S:.0f} s")


async def topic_id_partition(client: BrokerClient, topic: str, partition: int = 0) -> TopicIdPartition:
    """Returns a partition with its topic id. Does not wait: the broker that answers must know the topic."""
    metadata = await client.metadata()
    topic_id: UUID = metadata.topics[topic].topic_id
    return TopicIdPartition(topic_id, partition, topic)
