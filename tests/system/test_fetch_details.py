"""Fetch over both tiers: fairness with the smallest limits, and a consumer of a follower's rack."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Consumer, TopicPartition

from protocol.apis.fetch.response import FetchResponse
from protocol.errors import ErrorCode
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.broker.fetch_frames import Ask
from tests.support.rigs import strict_consumer
from tests.support.rigs.raw_client import Forwarded, RawClient, raw_client
from tests.support.rigs.two_tiers_rig import TwoTiers, two_tiers
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values

pytestmark = pytest.mark.integration

VERSION = 17
LONG_MS = 120_000
"""A wait that is longer than any test takes."""


async def fill(
    tiers: TwoTiers, topic: str, values: list[bytes], partitions: int = 1, *, is_tiered: bool = True, replicas: int = 1
) -> UUID:
    """Creates a topic and produces the values to every partition. Most of a tiered topic is then remote."""
    create_topic(tiers.kafka.bootstrap_servers, topic, partitions=partitions, replicas=replicas)
    for n in range(partitions):
        await asyncio.to_thread(partial(produce, tiers.bootstrap, topic, values, partition=n, records_per_batch=1))
    for n in range(partitions if is_tiered else 0):
        await tiers.settled(topic, n)
    return (await tiers.partition(topic)).topic_id


def sizes(response: FetchResponse) -> dict[tuple[object, int], int]:
    assert {one.error_code for one in response.partitions} <= {0}
    return {(one.topic, one.partition): one.records_bytes for one in response.partitions}


async def answered(client: RawClient, asked: Sequence[Ask], **more: Any) -> FetchResponse:
    """Fetches, and retries where a client does: one tier waits only shortly for the other one's judgement."""
    return await settled(client, await client.fetch(VERSION, asked, **more), asked, **more)


async def settled(client: RawClient, response: FetchResponse, asked: Sequence[Ask], **more: Any) -> FetchResponse:
    async with asyncio.timeout(120):
        while ErrorCode.REPLICA_NOT_AVAILABLE in {one.error_code for one in response.partitions}:
            response = await client.fetch(VERSION, asked, **more)
    return response


async def until_known(client: RawClient, *asked: Ask) -> FetchResponse:
    """Polls until the first partition, which is remote, returns records. The proxy predicts it from then on."""
    async with asyncio.timeout(120):
        while True:
            response = await answered(client, asked, max_wait_ms=300)
            if sizes(response)[asked[0].topic, asked[0].partition]:
                return response


async def test_limits_of_one_byte_bring_one_batch_of_every_partition_in_turn(tiers: TwoTiers, topic: str) -> None:
    """This holds with a min.bytes that exceeds the available records, and for a client that does not wait."""
    values = random_values(8, 10_000)
    remote = await fill(tiers, topic, values, 3)
    local = await fill(tiers, f"local-{topic}", values, is_tiered=False)
    order: list[tuple[UUID, int]] = [*((remote, n) for n in range(3)), (local, 0)]
    positions = dict.fromkeys(order, 0)
    async with raw_client(tiers.bootstrap) as client:
        async with asyncio.timeout(120):
            while any(position < len(values) for position in positions.values()):
                asked = [Ask(topic_id, n, positions[topic_id, n], max_bytes=1) for topic_id, n in order]
                response = await answered(client, asked, max_wait_ms=0, min_bytes=1 << 20, max_bytes=1)
                got = [key for key, size in sizes(response).items() if size]
                assert len(got) <= 1
                for one in response.partitions:
                    if one.records_bytes and isinstance(one.topic, UUID):
                        (batch,) = iterate_batches(response.records(one))
                        assert batch.base_offset == positions[one.topic, one.partition]
                        positions[one.topic, one.partition] = batch.next_offset
                        order.remove((one.topic, one.partition))
                        order.append((one.topic, one.partition))
        assert set(positions.values()) == {len(values)}


async def test_a_consumer_of_a_followers_rack_reads_both_tiers(
    kafka_of_three: KafkaCluster, tmp_path: Path, topic: str
) -> None:
    """The leader names the follower for local records. The proxy adds no records to such an answer."""
    async with two_tiers(kafka_of_three, tmp_path, "tiered-*") as tiers:
        values = random_values(100)
        remote = await fill(tiers, topic, values, replicas=3)
        local = await fill(tiers, f"local-{topic}", values[:5], 6, is_tiered=False, replicas=3)
        topics = (await tiers.client.metadata()).topics
        leader = topics[topic].partitions[0].leader_id
        follower = next(node for node in (1, 2, 3) if node != leader)
        led = next(n for n, one in topics[f"local-{topic}"].partitions.items() if one.leader_id == leader)
        host, _, port = tiers.bootstrap.rpartition(":")
        rack = {"rack_id": f"rack{follower}"}
        local_start = await tiers.local_log_start(topic)
        forwarded = Forwarded(tiers.fetch)
        async with (
            raw_client(f"{host}:{int(port) + leader}") as at_leader,
            raw_client(f"{host}:{int(port) + follower}") as at_follower,
        ):
            async with asyncio.timeout(120):
                while True:
                    response = await at_leader.fetch(VERSION, [Ask(local, led, 0)], **rack)
                    (entry,) = response.partitions
                    if entry.preferred_read_replica >= 0:
                        break
            assert (entry.preferred_read_replica, entry.error_code, entry.records_bytes) == (follower, 0, 0)
            asked = [Ask(remote, 0, 0), Ask(local, led, 0)]
            for _ in range(2):
                first, second = (await answered(at_leader, asked, max_wait_ms=LONG_MS, **rack)).partitions
                assert (second.preferred_read_replica, second.error_code, second.records_bytes) == (follower, 0, 0)
                assert (first.preferred_read_replica, first.error_code) == (-1, 0)
            response = await until_known(at_follower, Ask(remote, 0, 0))
            assert values[0] in bytes(response.records(response.partitions[0]))
            forwarded.changed.clear()
            async with asyncio.timeout(120):
                while True:
                    response = await answered(at_follower, [Ask(remote, 0, local_start)])
                    if sizes(response)[remote, 0]:
                        break
            assert values[local_start] in bytes(response.records(response.partitions[0]))
            assert not forwarded.changed
        found = await asyncio.to_thread(read_from_rack, tiers.bootstrap, topic, f"rack{follower}", len(values))
        assert found == list(enumerate(values))


def read_from_rack(bootstrap: str, topic: str, rack: str, count: int) -> list[tuple[int, bytes]]:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "auto.offset.reset": "error", "client.rack": rack}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    try:
        return strict_consumer.read(consumer, count)
    finally:
        consumer.close()
