"""Fetch over both tiers: limits, long polls, fairness, quotas, replicas and the drain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
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
from tests.support.servers.kafka import CONFIG_COMMAND, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values

pytestmark = pytest.mark.integration

VERSION = 17
LARGE_BYTES = 50_000
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


async def test_local_data_ends_a_wait_for_the_store_and_remote_data_comes_next(tiers: TwoTiers, topic: str) -> None:
    remote = await fill(tiers, topic, random_values(60), 2)
    local = await fill(tiers, f"local-{topic}", [], is_tiered=False)
    forwarded = Forwarded(tiers.fetch)
    async with raw_client(tiers.bootstrap) as client:
        await until_known(client, Ask(remote, 0, 0))
        gate = tiers.storage.gate = asyncio.Event()
        for n in range(2):  # the first time without a prediction, then with one
            asked = [Ask(remote, 1, 0), Ask(local, 0, n)]
            await client.send(VERSION, asked, max_wait_ms=LONG_MS, min_bytes=1)
            await asyncio.to_thread(produce, tiers.bootstrap, f"local-{topic}", [b"now"])
            response = await settled(client, await client.receive(VERSION), asked, max_wait_ms=LONG_MS, min_bytes=1)
            assert sizes(response)[local, 0] > 0
            assert sizes(response)[remote, 1] == 0
        _, left = forwarded.changed[-1]
        assert left is not None
        assert left.max_wait_ms == 0, "the proxy must wait, not the broker"
        gate.set()
        response = await until_known(client, Ask(remote, 1, 0), Ask(local, 0, 2))
        assert sizes(response)[remote, 1] > 0


async def test_min_bytes_counts_both_tiers_together(tiers: TwoTiers, topic: str) -> None:
    """Neither tier alone has min.bytes. The records come when the wait ends or when every read has ended."""
    remote = await fill(tiers, topic, random_values(60))
    local = await fill(tiers, f"local-{topic}", random_values(2), is_tiered=False)
    async with raw_client(tiers.bootstrap) as client:
        await until_known(client, Ask(remote, 0, 0))
        both = [Ask(remote, 0, 0, max_bytes=5_000), Ask(local, 0, 0)]
        async with asyncio.timeout(120):
            while not (got := sizes(await answered(client, both, max_wait_ms=500, min_bytes=1 << 20)))[remote, 0]:
                pass  # on a busy machine a read may last longer than this wait
        assert got[local, 0] > 2_000
        assert 0 < got[remote, 0] <= 5_000
        alone = sizes(await answered(client, both[:1], max_wait_ms=0, min_bytes=1 << 20))
        assert 0 < alone[remote, 0] <= 5_000


@pytest.mark.parametrize("is_remote_first", [True, False])
async def test_one_byte_budget_spans_both_tiers(tiers: TwoTiers, topic: str, is_remote_first: bool) -> None:
    remote = await fill(tiers, topic, random_values(100))
    local = await fill(tiers, f"local-{topic}", random_values(100), is_tiered=False)
    forwarded = Forwarded(tiers.fetch)
    asked = [Ask(remote, 0, 0, max_bytes=20_000), Ask(local, 0, 0, max_bytes=20_000)]
    if not is_remote_first:
        asked.reverse()
    async with raw_client(tiers.bootstrap) as client:
        await until_known(client, Ask(remote, 0, 0))
        async with asyncio.timeout(120):
            while True:
                got = sizes(await answered(client, asked, max_wait_ms=300, max_bytes=30_000))
                assert sum(got.values()) <= 30_000
                if got[remote, 0]:
                    break
        assert got[remote, 0] > 15_000
        assert 0 < got[local, 0] <= 10_000
        _, left = forwarded.changed[-1]
        assert left is not None
        assert left.max_bytes == 10_000


@pytest.mark.parametrize("first", ["remote", "local", "both remote"])
async def test_a_batch_larger_than_every_limit_comes_whole(tiers: TwoTiers, topic: str, first: str) -> None:
    values = random_values(3, LARGE_BYTES)
    remote = await fill(tiers, topic, values, 2)
    local = await fill(tiers, f"local-{topic}", values, is_tiered=False)
    asked = {
        "remote": [Ask(remote, 0, 0, max_bytes=500), Ask(local, 0, 0, max_bytes=500)],
        "local": [Ask(local, 0, 0, max_bytes=500), Ask(remote, 0, 0, max_bytes=500)],
        "both remote": [Ask(remote, 0, 0, max_bytes=500), Ask(remote, 1, 0, max_bytes=500)],
    }[first]
    async with raw_client(tiers.bootstrap) as client:
        for n in range(2):  # the first time without a prediction, then with one
            response = await answered(client, asked, max_wait_ms=LONG_MS, max_bytes=1000)
            got = [one for one in response.partitions if one.records_bytes]
            assert len(got) == 1, (n, "one broker answers so too")
            (batch,) = iterate_batches(response.records(got[0]))
            assert batch.size_bytes == got[0].records_bytes > LARGE_BYTES
            assert batch.base_offset == 0
            if first == "both remote":
                assert got[0].partition == 0
        for index in range(2):  # a consumer requests the partition without records first
            response = await until_known(client, Ask(remote, index, 1, max_bytes=500))
            assert values[1] in bytes(response.records(response.partitions[0]))


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


async def test_an_empty_throttled_answer_is_relayed_without_remote_records(tiers: TwoTiers, topic: str) -> None:
    remote = await fill(tiers, topic, random_values(100))
    local = await fill(tiers, f"local-{topic}", random_values(300), is_tiered=False)

    async def quota(*change: str) -> None:
        entity = ("--entity-type", "clients", "--entity-name", "test")
        args = ("--bootstrap-server", tiers.bootstrap, "--alter", *entity, *change)
        await asyncio.to_thread(tiers.kafka.run_tool, CONFIG_COMMAND, *args)

    async with raw_client(tiers.bootstrap) as client:
        await until_known(client, Ask(remote, 0, 0))
        await quota("--add-config", "consumer_byte_rate=20000")
        try:
            async with asyncio.timeout(120):
                while True:
                    response = await client.fetch(VERSION, [Ask(local, 0, 0), Ask(remote, 0, 0)], max_wait_ms=0)
                    if response.throttle_time_ms > 0:
                        break
            assert (response.error_code, response.session_id, response.partitions) == (0, 0, [])
        finally:
            await quota("--delete-config", "consumer_byte_rate")


@pytest.mark.parametrize("version", [12, 17])
async def test_a_followers_request_is_left_alone(tiers: TwoTiers, topic: str, version: int) -> None:
    remote = await fill(tiers, topic, random_values(60))
    asked = [Ask(remote if version >= 13 else topic, 0, 0)]
    forwarded = Forwarded(tiers.fetch)
    async with raw_client(tiers.bootstrap) as client, raw_client(tiers.kafka.bootstrap_servers) as direct:
        through = await client.fetch(version, asked, replica_id=2)
        alone = await direct.fetch(version, asked, replica_id=2)
    assert bytes(through.payload) == bytes(alone.payload)
    assert [one.error_code for one in through.partitions] != [0]
    assert (len(forwarded.untouched), forwarded.changed) == (1, [])


async def test_a_held_remote_fetch_is_answered_empty_when_the_proxy_drains(
    kafka: KafkaCluster, tmp_path: Path, topic: str
) -> None:
    async with AsyncExitStack() as proxy, AsyncExitStack() as clients, asyncio.TaskGroup() as group:
        tiers = await proxy.enter_async_context(two_tiers(kafka, tmp_path, "tiered-*"))
        remote = await fill(tiers, topic, random_values(60))
        client = await clients.enter_async_context(raw_client(tiers.bootstrap))
        gate = tiers.storage.gate = asyncio.Event()
        tiers.storage.asked.clear()
        await client.send(VERSION, [Ask(remote, 0, 0)], session_epoch=0, max_wait_ms=LONG_MS)
        async with asyncio.timeout(120):
            await tiers.storage.asked.wait()
        drained = group.create_task(proxy.aclose())
        response = await client.receive(VERSION)
        assert (response.error_code, response.session_id, response.partitions) == (ErrorCode.NONE, 0, [])
        assert response.throttle_time_ms > 0, "without a throttle time the Java client would drop the answer"
        assert await client.is_closed()
        gate.set()
        await drained


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
