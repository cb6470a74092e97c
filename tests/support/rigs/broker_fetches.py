"""Fetches with a `BrokerClient` from a broker or from a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocol.errors import ErrorCode
from tests.support.rigs.waiting import TIMEOUT_S
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import topic_id_partition
from tiers.broker.client import BrokerClient
from tiers.broker.fetch import FetchedPartition, FetchPosition, fetch_raw
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition


@asynccontextmanager
async def client_of(address: tuple[str, int]) -> AsyncIterator[BrokerClient]:
    client = BrokerClient([address], client_id="test")
    try:
        yield client
    finally:
        await client.close()


async def settled(kafka: KafkaCluster, topic: str) -> int:
    """Waits until the broker has trimmed the topic to less than a third. Returns the local log start."""
    async with client_of(kafka.address()) as client, asyncio.timeout(TIMEOUT_S):
        partition = await topic_id_partition(client, topic)
        source = BrokerLogSource(client)
        while True:
            bounds = await source.bounds(partition, 60_000)
            if bounds.log_start_offset > bounds.high_watermark * 2 // 3:
                return bounds.log_start_offset
            await asyncio.sleep(0.2)


async def fetch(client: BrokerClient, partition: TopicIdPartition, offset: int = 0) -> FetchedPartition:
    (fetched,) = await fetch_raw(
        client,
        1,
        [FetchPosition(partition.topic_id, partition.partition, offset)],
        max_bytes=1 << 20,
        max_wait_ms=100,
    )
    return fetched


async def answered(client: BrokerClient, partition: TopicIdPartition, offset: int) -> FetchedPartition:
    """Fetches, and retries as every client does."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            fetched = await fetch(client, partition, offset)
            if fetched.error != ErrorCode.REPLICA_NOT_AVAILABLE:
                return fetched
            await asyncio.sleep(0.1)
