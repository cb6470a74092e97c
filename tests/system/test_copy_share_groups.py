"""The start offsets of share groups, from a real broker."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from uuid import uuid4

import pytest

from tests.support.clients.share_member import ShareMember, start_at_earliest
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import TopicWith, delete_topic, produce, topic_id_partition
from tiers.broker.client import BrokerClient
from tiers.broker.share_groups import ClusterShareGroups
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

pytestmark = pytest.mark.integration

TIMEOUT_MS = 60_000
WAIT_S = 300


async def test_the_lowest_start_offset_of_any_share_group_is_found(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str, topic_with: TopicWith
) -> None:
    bootstrap = kafka.bootstrap_servers
    topic_with([b"%d" % n for n in range(50)], partitions=2)
    ahead, behind = f"{topic_name}-ahead", f"{topic_name}-behind"
    partition = await topic_id_partition(client, topic_name)
    groups = ClusterShareGroups(client)

    async def lowest(partition: TopicIdPartition) -> int | None:
        """Returns the lowest start offset. Retries while the broker does not answer, as a trim does."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with suppress(BrokerError):
                    return await groups.lowest_start(partition, TIMEOUT_MS)
                await asyncio.sleep(0.1)

    async def until(partition: TopicIdPartition, wanted: int | None) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                if await lowest(partition) == wanted:
                    return
                await asyncio.sleep(0.1)

    await until(partition, None)
    with ShareMember() as first, ShareMember() as second:
        for group in (ahead, behind):
            await asyncio.to_thread(start_at_earliest, bootstrap, group)
        await asyncio.to_thread(first.join, bootstrap, ahead, topic_name)
        assert len(await asyncio.to_thread(first.acquire)) == 50
        assert await lowest(partition) == 0, "the records are acquired, but none is acknowledged"
        await asyncio.to_thread(first.acknowledge, "ACCEPT")
        await asyncio.to_thread(partial(produce, bootstrap, topic_name, [b"more"]))
        await asyncio.to_thread(first.take, 1)
        await until(partition, 50)

        await asyncio.to_thread(second.join, bootstrap, behind, topic_name)
        await asyncio.to_thread(second.acquire)
        assert await lowest(partition) == 0, "the other group has acknowledged no record"
        await asyncio.to_thread(second.leave)
        await asyncio.to_thread(first.leave)
    assert await lowest(partition) == 0, "the member released its records when it left"

    await asyncio.to_thread(delete_topic, bootstrap, topic_name)
    # The broker may answer an error for the deleted topic. It must affect only that partition.
    await until(TopicIdPartition(uuid4(), 0), None)
