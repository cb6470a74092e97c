"""Clients of every make, that read committed records from an offset on, so many bytes at a time, and never reset."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiokafka  # type: ignore[import-untyped]  # ships no types
import confluent_kafka
import kafka as kafka_python

from tests.servers.franz import read_with_franz
from tests.servers.kafka import CONSOLE_CONSUMER, KafkaCluster

TIMEOUT_S = 60.0
RECORD = tuple[int, bytes]
"""Offset and value."""
Read = Callable[[str, str, int, int, int], list[RECORD]]
"""Bootstrap, topic, offset, count of records, bytes per fetch."""


def read_with_kafka_python(bootstrap: str, topic: str, offset: int, count: int, max_bytes: int) -> list[RECORD]:
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="none",
        consumer_timeout_ms=30_000,
        max_partition_fetch_bytes=max_bytes,
    )
    partition = kafka_python.TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, offset)
    try:
        return [(message.offset, message.value) for _, message in zip(range(count), consumer, strict=False)]
    finally:
        consumer.close()


def read_with_librdkafka(bootstrap: str, topic: str, offset: int, count: int, max_bytes: int) -> list[RECORD]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "check.crcs": True,
            "fetch.message.max.bytes": max_bytes,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, offset)])
    found: list[RECORD] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(found) < count and time.monotonic() < deadline:
            for message in consumer.consume(count - len(found), 1.0):
                assert message.error() is None
                at, value = message.offset(), message.value()
                assert at is not None
                assert isinstance(value, bytes)
                found.append((at, value))
    finally:
        consumer.close()
    return found


def read_with_aiokafka(bootstrap: str, topic: str, offset: int, count: int, max_bytes: int) -> list[RECORD]:
    async def read() -> list[RECORD]:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="none",
            max_partition_fetch_bytes=max_bytes,
        )
        partition = aiokafka.TopicPartition(topic, 0)
        await consumer.start()
        try:
            consumer.assign([partition])
            consumer.seek(partition, offset)
            found: list[RECORD] = []
            async with asyncio.timeout(TIMEOUT_S):
                while len(found) < count:
                    message = await consumer.getone()
                    found.append((message.offset, message.value))
            return found
        finally:
            await consumer.stop()

    return asyncio.run(read())


CLIENTS: list[Read] = [read_with_kafka_python, read_with_librdkafka, read_with_aiokafka]


def read_with_java(kafka: KafkaCluster, bootstrap: str, topic: str, count: int, max_bytes: int) -> list[bytes]:
    """From the start; values are words."""
    consumed = kafka.run_tool(
        CONSOLE_CONSUMER,
        *("--bootstrap-server", bootstrap, "--topic", topic, "--from-beginning"),
        *("--isolation-level", "read_committed", "--max-messages", str(count), "--timeout-ms", "30000"),
        *("--command-property", f"max.partition.fetch.bytes={max_bytes}"),
    )
    return [line.encode() for line in consumed.stdout.split("\n")[:count]]


def read_with_franz_from_start(bootstrap: str, topic: str, count: int) -> list[bytes]:
    """Values are words."""
    return [record.value for record in read_with_franz(bootstrap, [topic], count)]
