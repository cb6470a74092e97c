"""librdkafka as a consumer that fails instead of resetting its position, and the state of the broker's own log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of

TIMEOUT_S = 300.0
RECORD = tuple[int, bytes]
"""An offset and a value."""

_PASSING = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._RESOLVE}
"""The errors of librdkafka when a broker went away. librdkafka itself retries."""


@contextmanager
def consumer_at(
    bootstrap: str, topic: str, offset: int, partition: int = 0, settings: Mapping[str, str | int] | None = None
) -> Iterator[Consumer]:
    """Yields an unmodified consumer, whose settings let it fail instead of resetting its position."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "auto.offset.reset": "error",
            "check.crcs": True,
            "fetch.queue.backoff.ms": 10,
            "queued.max.messages.kbytes": 1024,
            **(settings or {}),
        }
    )
    consumer.assign([TopicPartition(topic, partition, offset)])
    try:
        yield consumer
    finally:
        consumer.close()


def read(consumer: Consumer, count: int) -> list[RECORD]:
    found: list[RECORD] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count and time.monotonic() < deadline:
        for message in consumer.consume(min(500, count - len(found)), 0.5):
            error = message.error()
            if error is not None:
                assert error.code() in _PASSING, str(error)
                continue
            offset, value = message.offset(), message.value()
            assert offset is not None
            assert isinstance(value, bytes)
            found.append((offset, value))
    return found


def local_log_start(cluster: KafkaCluster, topic: str) -> int:
    return _watermarks(cluster, topic)[0]


def _watermarks(cluster: KafkaCluster, topic: str) -> tuple[int, int]:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "unused"})
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S)
        return int(low), int(high)
    finally:
        consumer.close()


def until_trimmed(cluster: KafkaCluster, topic: str, offset: int) -> int:
    deadline = time.monotonic() + TIMEOUT_S
    while (start := local_log_start(cluster, topic)) < offset:
        assert time.monotonic() < deadline, f"the local log starts at {start}, not yet at {offset}"
        time.sleep(0.2)
    return start


def log_bytes(cluster: KafkaCluster, topic: str, offset: int) -> int:
    """Returns the size of partition 0's batches from `offset` on. It reads at most a MiB."""
    listed = AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(topic, TIMEOUT_S)
    leader = listed.topics[topic].partitions[0].leader
    with Peer(cluster.address(leader)) as peer:
        (found,) = peer.fetch(17, topic, topic_id_of(cluster.bootstrap_servers, topic), offset).partitions
    assert found.error_code == 0
    return found.records_bytes
