"""The answers for leader epochs of a trimmed log equal the broker's answers before the trim.

For an offset at the local log start or above, the broker answers a last fetched epoch itself. As without a remote tier,
an epoch that it forgot ends there.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kafka.protocol.admin import AlterPartitionReassignmentsRequest, ElectLeadersRequest

from protocol.errors import ErrorCode
from protocol.records.record_batch import verify_batches
from tests.support.rigs import late_tier
from tests.support.rigs.two_tiers_rig import PATTERN, TwoTiers, two_tiers
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of
from tests.support.servers.producing import create_topic, produce, random_values, topic_id_partition
from tiers.broker.client import BrokerClient, Leader

pytestmark = pytest.mark.integration

VERSIONS = range(2, 5)
RECORDS_PER_EPOCH = 50
WRITTEN = (True, True, False, True, True)
"""Whether a record was written in each epoch, in order."""

_PREFERRED = 0


async def move_leader(client: BrokerClient, topic: str, to: int) -> Leader:
    """Moves the leader with a preferred election. The replicas stay, and their order changes."""
    partition = await topic_id_partition(client, topic)
    others = [node for node in (1, 2, 3) if node != to]
    reassigned: Any = AlterPartitionReassignmentsRequest
    one = reassigned.ReassignableTopic.ReassignablePartition(partition_index=0, replicas=[to, *others])
    entry = reassigned.ReassignableTopic(name=topic, partitions=[one])
    while True:
        answer = await client.request(None, reassigned(timeout_ms=20_000, topics=[entry]))
        if answer.error_code != ErrorCode.REQUEST_TIMED_OUT:
            break
    assert answer.error_code == 0
    elect: Any = ElectLeadersRequest
    topics = [elect.TopicPartitions(topic=topic, partitions=[0])]
    async with asyncio.timeout(300):
        while True:
            await client.request(
                None, elect(election_type=_PREFERRED, topic_partitions=topics, timeout_ms=20_000), min_version=1
            )
            leader = await client.leader_of(partition, max_age_ms=0)
            if leader.node_id == to:
                return leader
            await asyncio.sleep(0.1)


async def history(kafka: KafkaCluster, topic: str) -> Leader:
    """Writes records in several leader epochs. The third epoch is empty. Returns the last leader."""
    await asyncio.to_thread(create_topic, kafka.bootstrap_servers, topic, replicas=3)
    client = BrokerClient([kafka.address(node) for node in (1, 2, 3)], client_id="test")
    try:
        leader = await client.leader_of(await topic_id_partition(client, topic))
        for number, is_written in enumerate(WRITTEN):
            if number:
                leader = await move_leader(client, topic, leader.node_id % 3 + 1)
            if is_written:
                await asyncio.to_thread(
                    produce, kafka.bootstrap_servers, topic, random_values(RECORDS_PER_EPOCH), records_per_batch=5
                )
        return leader
    finally:
        await client.close()


def end_offsets(address: tuple[str, int], topic: str, leader_epoch: int) -> list[tuple[int, int, int]]:
    """Returns the answers for known and unknown epochs, at every version, with right, no and wrong leader epochs."""
    with Peer(address) as peer:
        return [
            peer.offset_for_leader_epoch(version, topic, asked, current_leader_epoch=current)
            for version in VERSIONS
            for asked in range(-1, leader_epoch + 3)
            for current in (-1, leader_epoch, leader_epoch - 1, leader_epoch + 1)
        ]


Fetched = tuple[int, tuple[int, int] | None, int | None]
"""The error, the diverging epoch with its end offset, and the first offset of the records."""


def fetched(address: tuple[str, int], topic: str, leader_epoch: int, end_offset: int) -> dict[tuple[int, ...], Fetched]:
    """Returns the answers by version, offset, last fetched epoch and leader epoch."""
    topic_id = topic_id_of(f"{address[0]}:{address[1]}", topic)
    found: dict[tuple[int, ...], Fetched] = {}
    with Peer(address) as peer:
        for version in (12, 17):
            for offset in range(0, end_offset, 30):
                for last in range(-1, leader_epoch + 2):
                    for current in (-1, leader_epoch, leader_epoch - 1, leader_epoch + 1):
                        ask = partial(
                            peer.fetch,
                            version,
                            topic,
                            topic_id,
                            offset,
                            max_bytes=1,
                            last_fetched_epoch=last,
                            current_leader_epoch=current,
                        )
                        response = late_tier.fetched(ask)
                        (one,) = response.partitions
                        batches = verify_batches(response.records(one))
                        found[version, offset, last, current] = (
                            one.error_code,
                            response.diverging_epoch(one),
                            batches[0].base_offset if batches else None,
                        )
    return found


def listed_offsets(address: tuple[str, int], topic: str, timestamps: list[int], leader_epoch: int) -> list[Any]:
    with Peer(address) as peer:
        return [
            late_tier.listed(peer, version, topic, [(0, one)], current_leader_epoch=current)
            for version in (4, 7, 11)
            for one in timestamps
            for current in (-1, leader_epoch, leader_epoch - 1, leader_epoch + 1)
        ]


def timestamps_of(address: tuple[str, int], topic: str) -> list[int]:
    topic_id = topic_id_of(f"{address[0]}:{address[1]}", topic)
    with Peer(address) as peer:
        response = peer.fetch(17, topic, topic_id, 0)
    return [batch.max_timestamp for batch in verify_batches(response.records(response.partitions[0]))]


async def test_answers_for_epochs_are_the_same_after_the_trim(
    kafka_of_three: KafkaCluster, tmp_path: Path, topic: str
) -> None:
    kafka = kafka_of_three
    leader = await history(kafka, topic)
    address = kafka.address(leader.node_id)
    end_offset = RECORDS_PER_EPOCH * sum(WRITTEN)
    asked = [-2, -1, *await asyncio.to_thread(timestamps_of, address, topic)]
    ends = await asyncio.to_thread(end_offsets, address, topic, leader.leader_epoch)
    answers = await asyncio.to_thread(fetched, address, topic, leader.leader_epoch, end_offset)
    listed = await asyncio.to_thread(listed_offsets, address, topic, asked, leader.leader_epoch)
    kinds = {(error, diverging is not None) for error, diverging, _ in answers.values()}
    assert kinds == {
        (ErrorCode.NONE, False),
        (ErrorCode.NONE, True),
        (ErrorCode.OFFSET_OUT_OF_RANGE, False),
        (ErrorCode.FENCED_LEADER_EPOCH, False),
        (ErrorCode.UNKNOWN_LEADER_EPOCH, False),
    }
    assert len({epoch for ((_, error, *_, epoch),) in listed if not error}) == sum(WRITTEN)

    async with two_tiers(kafka, tmp_path, PATTERN) as tiers:
        seam = await tiers.settled(topic)
        assert seam > end_offset - RECORDS_PER_EPOCH
        proxy = tiers.address_of(leader.node_id)
        forgotten = await asyncio.to_thread(end_offsets, address, topic, leader.leader_epoch)
        assert forgotten != ends
        assert await asyncio.to_thread(end_offsets, proxy, topic, leader.leader_epoch) == ends
        assert await asyncio.to_thread(listed_offsets, proxy, topic, asked, leader.leader_epoch) == listed
        after = await asyncio.to_thread(fetched, proxy, topic, leader.leader_epoch, end_offset)
        # At the local log start and above, the broker itself answers with the epochs that it still knows.
        local = await asyncio.to_thread(fetched, address, topic, leader.leader_epoch, end_offset)
        expected = {key: answer if key[1] < seam else local[key] for key, answer in answers.items()}
        assert {key: (expected[key], one) for key, one in after.items() if one != expected[key]} == {}
        await check_not_the_leader(tiers, topic, leader, end_offset)


async def check_not_the_leader(tiers: TwoTiers, topic: str, leader: Leader, end_offset: int) -> None:
    """The proxy relays a follower's refusal, also for remote offsets."""
    follower = tiers.address_of(leader.node_id % 3 + 1)

    def ask() -> tuple[Any, Any]:
        with Peer(follower) as peer:
            return peer.list_offsets(11, topic, [(0, -2)]), peer.offset_for_leader_epoch(4, topic, leader.leader_epoch)

    listed, end = await asyncio.to_thread(ask)
    assert listed == [(0, ErrorCode.NOT_LEADER_OR_FOLLOWER, -1, -1, -1)]
    assert end == (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1, -1)
