from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

from kafka.protocol.metadata import MetadataResponse

from tiers.broker.cluster_metadata import (
    SLICE_BYTES,
    ClusterMetadata,
    read_cluster_metadata,
    without_unknown,
)


def answer_of(topic_id: int, leader_epochs: Mapping[int, int], name: str = "orders") -> bytes:
    described = MetadataResponse.MetadataResponseTopic
    topic = described(
        error_code=0,
        name=name,
        topic_id=UUID(int=topic_id),
        is_internal=False,
        partitions=[
            described.MetadataResponsePartition(
                error_code=0,
                partition_index=index,
                leader_id=1,
                leader_epoch=epoch,
                replica_nodes=[1, 2, 3],
                isr_nodes=[1, 2],
                offline_replicas=[],
            )
            for index, epoch in leader_epochs.items()
        ],
    )
    broker = MetadataResponse.MetadataResponseBroker(node_id=1, host="a", port=9092, rack=None)
    response = MetadataResponse(throttle_time_ms=0, brokers=[broker], cluster_id="c", controller_id=1, topics=[topic])
    return bytes(response.encode(version=12))


async def read(body: bytes) -> ClusterMetadata:
    return await read_cluster_metadata(body, 12, 0, lambda topic_id: None)


async def test_an_answer_about_some_topics_leaves_the_others() -> None:
    known = await read(answer_of(7, {0: 1}))
    payments, made_again = await read(answer_of(9, {0: 1}, "payments")), await read(answer_of(8, {0: 1}))
    both, replaced = payments.with_topics_of(known, [UUID(int=9)])
    assert (sorted(both.topics), replaced) == (["orders", "payments"], [])
    nothing = without_unknown(replace(known, topics={}, topics_by_id={}))
    for answer, asked, left, gone in (
        (nothing, 7, {9}, known.topics["orders"]),
        (nothing, 9, {7}, payments.topics["payments"]),
        (made_again, 8, {8, 9}, known.topics["orders"]),
    ):
        rest, replaced = answer.with_topics_of(both, [UUID(int=asked)])
        assert ({one.int for one in rest.topics_by_id}, replaced) == (left, [gone])
        assert {topic.topic_id for topic in rest.topics.values()} == set(rest.topics_by_id)


async def test_a_large_answer_gives_way_after_each_slice() -> None:
    body = answer_of(7, dict.fromkeys(range(4_000), 1))
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(other_work())
    await read(body)
    other.cancel()
    assert turns >= len(body) // (SLICE_BYTES + 100) - 1  # the first slice ends before the other task begins
