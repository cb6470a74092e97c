"""The whole of it as processes: Kafka, `tidegate serve` and a real S3 that dies in the middle of a backfill."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.servers.kafka import KafkaCluster
from tests.servers.producing import create_topic, produce, random_values
from tests.servers.tidegate import TidegateProcess, tidegate_over
from tests.servers.versitygw import ACCESS_KEY_ID, SECRET_ACCESS_KEY, VersityGateway

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
RECORDS = 12_000
BUCKET = "whole"
RECORD = tuple[int, bytes]
"""Offset and value."""


@pytest.fixture
def values() -> list[bytes]:
    return random_values(RECORDS)


def proxy_over_s3(cluster: KafkaCluster, home: Path, gateway: VersityGateway, topic: str) -> TidegateProcess:
    return tidegate_over(
        cluster,
        home,
        tiered=[topic],
        storage={
            "implementation": "s3",
            "bucket": BUCKET,
            "region": "us-east-1",
            "endpoint.url": gateway.endpoint_url,
            "access.key.id": ACCESS_KEY_ID,
            "secret.access.key": SECRET_ACCESS_KEY,
            "path.style": "true",
            "timeout.ms": "2000",
        },
        settings={
            "remote.log.metadata.topic.name": f"__metadata-{topic}"[:200],
            "remote.log.visible.after.ms": 2000,
            "remote.log.chunk.cache.total.size.bytes": 1,
        },
    )


@contextmanager
def consumer_at(bootstrap: str, topic: str, offset: int) -> Iterator[Consumer]:
    """Unmodified, and told to fail rather than to jump."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "auto.offset.reset": "error",
            "check.crcs": True,
            "fetch.queue.backoff.ms": 10,
            "queued.max.messages.kbytes": 1024,
        }
    )
    consumer.assign([TopicPartition(topic, 0, offset)])
    try:
        yield consumer
    finally:
        consumer.close()


def read(consumer: Consumer, count: int) -> list[RECORD]:
    found: list[RECORD] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count and time.monotonic() < deadline:
        for message in consumer.consume(min(500, count - len(found)), 0.5):
            assert message.error() is None
            offset, value = message.offset(), message.value()
            assert offset is not None
            assert isinstance(value, bytes)
            found.append((offset, value))
    return found


def local_log_start(cluster: KafkaCluster, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "unused"})
    try:
        low, _ = consumer.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S)
        return int(low)
    finally:
        consumer.close()


def until_trimmed(cluster: KafkaCluster, topic: str, offset: int) -> int:
    deadline = time.monotonic() + TIMEOUT_S
    while (start := local_log_start(cluster, topic)) < offset:
        assert time.monotonic() < deadline, f"the local log starts at {start}, not yet at {offset}"
        time.sleep(0.2)
    return start


async def test_a_store_that_dies_costs_time_and_a_lost_state_folder_nothing(
    kafka: KafkaCluster, s3: VersityGateway, topic_name: str, tmp_path: Path, values: list[bytes]
) -> None:
    await s3.create_bucket(BUCKET)
    create_topic(kafka.bootstrap_servers, topic_name)
    create_topic(kafka.bootstrap_servers, f"{topic_name}-local")
    expected = list(enumerate(values))
    with proxy_over_s3(kafka, tmp_path, s3, topic_name) as proxy:
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, values)
        start = await asyncio.to_thread(until_trimmed, kafka, topic_name, RECORDS // 2)

        with consumer_at(proxy.bootstrap_servers, topic_name, 0) as consumer:
            first = await asyncio.to_thread(read, consumer, 500)
            assert first == expected[:500]
            s3.kill()
            try:
                # What the consumer has buffered still comes; the rest waits, without an error and without a jump.
                waiting = asyncio.create_task(asyncio.to_thread(read, consumer, RECORDS - 500))
                local_topic = f"{topic_name}-local"
                await asyncio.to_thread(produce, proxy.bootstrap_servers, local_topic, values[:100])
                with consumer_at(proxy.bootstrap_servers, local_topic, 0) as neighbour:
                    assert await asyncio.to_thread(read, neighbour, 100) == expected[:100]
                with consumer_at(proxy.bootstrap_servers, topic_name, start) as tail:
                    assert await asyncio.to_thread(read, tail, RECORDS - start) == expected[start:]
                assert not waiting.done()
            finally:
                s3.start()
            assert await waiting == expected[500:]

    shutil.rmtree(tmp_path / "state")
    with proxy_over_s3(kafka, tmp_path, s3, topic_name) as proxy:
        with consumer_at(proxy.bootstrap_servers, topic_name, 0) as consumer:
            assert await asyncio.to_thread(read, consumer, RECORDS) == expected
        assert 'tier="remote"' in proxy.metrics()
