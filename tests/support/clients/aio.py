"""The client aiokafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiokafka  # type: ignore[import-untyped]  # ships no types
from aiokafka.errors import OffsetOutOfRangeError  # type: ignore[import-untyped]  # ships no types

from tests.support.clients.client import FETCH_BYTES, TIMEOUT_S, ClientRecord, OffsetOutOfRange, Offsets, header_pairs


class AioKafka:
    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes]) -> None:
        async def run() -> None:
            async with _producer(bootstrap) as producer:
                await _send(producer, topic, values)

        asyncio.run(run())

    def transact(
        self, bootstrap: str, topic: str, values: Sequence[bytes], *, transactional_id: str, commit: bool
    ) -> None:
        async def run() -> None:
            async with _producer(bootstrap, transactional_id=transactional_id) as producer:
                await producer.begin_transaction()
                await _send(producer, topic, values)
                if commit:
                    await producer.commit_transaction()
                else:
                    await producer.abort_transaction()

        asyncio.run(run())

    def consume(self, bootstrap: str, topic: str, group: str, count: int, isolation: str) -> list[ClientRecord]:
        async def run() -> list[ClientRecord]:
            settings = {"group_id": group, "auto_offset_reset": "earliest", "enable_auto_commit": False}
            async with _consumer(bootstrap, topic, isolation_level=isolation, **settings) as consumer:
                found = await _take(consumer, count)
                await consumer.commit({aiokafka.TopicPartition(topic, 0): found[-1].offset + 1})
                return found

        return asyncio.run(run())

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        async def run() -> list[ClientRecord]:
            settings = {"auto_offset_reset": "none", "max_partition_fetch_bytes": max_bytes}
            async with _consumer(bootstrap, isolation_level=isolation, **settings) as consumer:
                partition = aiokafka.TopicPartition(topic, 0)
                consumer.assign([partition])
                consumer.seek(partition, offset)
                try:
                    return await _take(consumer, count)
                except OffsetOutOfRangeError as error:
                    raise OffsetOutOfRange from error

        return asyncio.run(run())

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        async def run() -> list[ClientRecord]:
            settings = {"auto_offset_reset": "none", "isolation_level": isolation}
            async with _consumer(bootstrap, **settings) as consumer:
                partition = aiokafka.TopicPartition(topic, 0)
                consumer.assign([partition])
                consumer.seek(partition, offset)
                found: list[ClientRecord] = []
                while await consumer.position(partition) < end:
                    for messages in (await consumer.getmany(timeout_ms=100)).values():
                        found += map(_record, messages)
                return found

        return asyncio.run(run())

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets:
        async def run() -> Offsets:
            async with _consumer(bootstrap) as consumer:
                partition = aiokafka.TopicPartition(topic, 0)
                earliest = (await consumer.beginning_offsets([partition]))[partition]
                latest = (await consumer.end_offsets([partition]))[partition]
                found = (await consumer.offsets_for_times({partition: timestamp}))[partition]
                return Offsets(earliest, latest, None if found is None else found.offset)

        return asyncio.run(run())


@asynccontextmanager
async def _producer(bootstrap: str, **settings: Any) -> AsyncIterator[Any]:
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=True, linger_ms=5, max_batch_size=4096, **settings
    )
    async with asyncio.timeout(TIMEOUT_S):
        await producer.start()
        try:
            yield producer
        finally:
            await producer.stop()


@asynccontextmanager
async def _consumer(bootstrap: str, *topics: str, **settings: Any) -> AsyncIterator[Any]:
    consumer = aiokafka.AIOKafkaConsumer(*topics, bootstrap_servers=bootstrap, **settings)
    async with asyncio.timeout(TIMEOUT_S):
        await consumer.start()
        try:
            yield consumer
        finally:
            await consumer.stop()


async def _send(producer: Any, topic: str, values: Sequence[bytes]) -> None:
    sent = [await producer.send(topic, value, partition=0) for value in values]
    await producer.flush()
    await asyncio.gather(*sent)


async def _take(consumer: Any, count: int) -> list[ClientRecord]:
    found: list[ClientRecord] = []
    while len(found) < count:
        found.append(_record(await consumer.getone()))
    return found


def _record(each: Any) -> ClientRecord:
    return ClientRecord(each.offset, each.timestamp, each.key, each.value, header_pairs(each.headers))
