"""The sizes in the remote tier: by leader, counted once for all requests, and for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import cast
from uuid import UUID

import lmdb

from protocol.apis.log_dirs import PartitionSizes
from protocol.apis.metadata import PartitionMetadata
from proxy.cluster.remote_sizes import MAX_AGE_MS, SLICE_PARTITIONS, RemoteSizes
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.tiers.segment_metadata import copied, segment
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata, TopicMetadata
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

ORDERS, PAYMENTS, GONE = UUID(int=1), UUID(int=2), UUID(int=3)

LONG_MS = 60_000


class Rig:
    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.metadata = InMemoryRemoteLogMetadataManager()
        self.now_ms = 0
        self.reads = 0
        self.trouble: Exception | None = None
        self.before_answer: Callable[[], Awaitable[object]] | None = None
        self.sizes = RemoteSizes(self.metadata.state, cast(BrokerClient, self), lambda: self.now_ms, group.create_task)

    async def named(self, names: Collection[str], ids: Collection[UUID], timeout_ms: int) -> ClusterMetadata:
        self.reads += 1
        if self.before_answer is not None:
            await self.before_answer()
        if self.trouble is not None:
            raise self.trouble
        leaders = {"orders": (ORDERS, {0: 1, 1: 2}), "payments": (PAYMENTS, {0: 2})}
        topics = {
            name: TopicMetadata(name, topic_id, {at: PartitionMetadata(at, node, 0) for at, node in led.items()})
            for name, (topic_id, led) in leaders.items()
            if topic_id in ids
        }
        by_id = {topic.topic_id: topic for topic in topics.values()}
        return ClusterMetadata("cluster", 1, {}, topics, 0, by_id)

    async def copy(self, topic_id: UUID, index: int, count: int = 1, first: int = 0) -> None:
        partition = TopicIdPartition(topic_id, index, "old-name")
        for number in range(first, first + count):
            await copied(self.metadata, segment(partition, number * 10, number * 10 + 9))

    async def of_both(self) -> list[PartitionSizes]:
        return [await self.sizes.led_by(node_id, LONG_MS) for node_id in (1, 2)]


async def test_each_partition_is_shown_by_its_leader_alone() -> None:
    async with asyncio.TaskGroup() as group:
        rig = Rig(group)
        await rig.copy(ORDERS, 0, 3)
        await rig.copy(ORDERS, 1, 2)
        await rig.copy(PAYMENTS, 0)
        assert await rig.of_both() == [{"orders": {0: 3000}}, {"orders": {1: 2000}, "payments": {0: 1000}}]
        assert await rig.sizes.led_by(7, LONG_MS) == {}
        assert rig.reads == 1


async def test_only_finished_segments_of_existing_topics_count() -> None:
    async with asyncio.TaskGroup() as group:
        rig = Rig(group)
        await rig.copy(GONE, 0)
        await rig.metadata.add_remote_log_segment_metadata(segment(TopicIdPartition(ORDERS, 1), 0, 9))
        assert await rig.of_both() == [{}, {}]


async def test_a_count_is_used_for_a_while() -> None:
    async with asyncio.TaskGroup() as group:
        rig = Rig(group)
        await rig.copy(ORDERS, 0)
        await rig.of_both()
        await rig.copy(ORDERS, 0, first=1)
        rig.now_ms = MAX_AGE_MS - 1
        assert await rig.sizes.led_by(1, LONG_MS) == {"orders": {0: 1000}}
        rig.trouble, rig.now_ms = BrokerError("no broker answers"), MAX_AGE_MS
        assert await rig.sizes.led_by(1, LONG_MS) == {"orders": {0: 1000}}
        rig.trouble = None
        assert await rig.sizes.led_by(1, LONG_MS) == {"orders": {0: 2000}}


async def test_a_request_does_not_wait_for_ever_for_a_count() -> None:
    answer = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        rig = Rig(group)
        await rig.copy(ORDERS, 0)
        rig.before_answer = answer.wait
        assert await rig.sizes.led_by(1, 0) == {}
        answer.set()
        assert await rig.of_both() == [{"orders": {0: 1000}}, {}]
        answer.clear()
        rig.now_ms = MAX_AGE_MS
        assert await rig.sizes.led_by(1, 0) == {"orders": {0: 1000}}
        answer.set()
    assert rig.reads == 2


async def test_a_count_that_fails_for_any_reason_ends_no_other_task() -> None:
    """The tasks of the server are in one group, and the client that asks chooses when to count."""
    async with asyncio.TaskGroup() as group:
        rig = Rig(group)
        await rig.copy(ORDERS, 0)
        rig.trouble = lmdb.Error("the state cannot be read")
        assert await rig.sizes.led_by(1, LONG_MS) == {}
        rig.trouble = None
        assert await rig.sizes.led_by(1, LONG_MS) == {"orders": {0: 1000}}


async def test_a_count_gives_way_to_other_tasks() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with asyncio.TaskGroup() as group:
        rig = Rig(group)
        for number in range(4 * SLICE_PARTITIONS):
            await rig.copy(ORDERS, number)
        beside = group.create_task(others())
        await rig.sizes.led_by(1, LONG_MS)
        beside.cancel()
    assert turns >= 4
