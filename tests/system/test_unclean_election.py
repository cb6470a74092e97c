"""A leader dies with records that only it and the remote tier have: clients read all of its successor's history."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.rigs import tier_command
from tests.support.rigs.strict_consumer import consumer_at, read, until_trimmed
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import topic_id_of
from tests.support.servers.producing import produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

SHARED, LOST, REPLACING = 5000, 1500, 6000
LEADER, FOLLOWER = 1, 2
"""The replicas of the topic. The one that is behind may become the leader."""
LOCAL_BYTES = 3 << 20


def create_replicated_topic(cluster: KafkaCluster, topic: str) -> None:
    config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    new = NewTopic(topic, num_partitions=1, replica_assignment=[[LEADER, FOLLOWER]], config=config)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_topics([new])[topic].result(TIMEOUT_S)
    topic_id_of(cluster.bootstrap_servers, topic)


def until_in_sync(cluster: KafkaCluster, topic: str) -> None:
    """Waits until both replicas are in sync. A replica that was paused must have all records before the other stops."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    until(lambda: {*admin.list_topics(topic, TIMEOUT_S).topics[topic].partitions[0].isrs} == {LEADER, FOLLOWER})


async def segments_of(proxy: TidegateProcess, topic: str) -> list[dict[str, Any]]:
    code, out, err = await tier_command.run(proxy.config, "segments", "--json", topic)
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)
    return found


async def until_remote(proxy: TidegateProcess, topic: str, end_offset: int) -> None:
    async with asyncio.timeout(300):
        while True:
            _, out, _ = await tier_command.run(proxy.config, "bounds", "--json", topic)
            if out and json.loads(out)[0]["remote_end"] == end_offset:
                return
            await asyncio.sleep(0.5)


async def test_the_history_is_the_new_leaders_and_the_rest_is_void(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    cluster, topic = kafka_of_three, topic_name[-40:]
    await asyncio.to_thread(create_replicated_topic, cluster, topic)
    shared, lost, replacing = (random_values(count) for count in (SHARED, LOST, REPLACING))
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic}",
        "remote.log.visible.after.ms": 2000,
    }
    with tidegate_over(
        cluster, tmp_path, tiered=[topic], local_retention_bytes=LOCAL_BYTES, settings=settings
    ) as proxy:
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic, shared)
        await asyncio.to_thread(until_trimmed, cluster, topic, 1000)
        await asyncio.to_thread(until_in_sync, cluster, topic)
        await asyncio.to_thread(cluster.stop_broker, FOLLOWER)
        try:
            await asyncio.to_thread(produce, proxy.bootstrap_servers, topic, lost)
            await until_remote(proxy, topic, SHARED + LOST - 1)
            assert all(each["valid_end_offset"] == each["end_offset"] for each in await segments_of(proxy, topic))
            await asyncio.to_thread(cluster.kill_broker, LEADER)
        finally:
            await asyncio.to_thread(cluster.start_broker, FOLLOWER)
        try:
            await asyncio.to_thread(produce, proxy.bootstrap_servers, topic, replacing)
            await asyncio.to_thread(until_trimmed, cluster, topic, SHARED + LOST)
            with consumer_at(proxy.bootstrap_servers, topic, 0) as consumer:
                found = await asyncio.to_thread(read, consumer, SHARED + REPLACING)
            assert found == list(enumerate(shared + replacing))

            void = {
                each["segment"]: range(max(each["start_offset"], each["valid_end_offset"] + 1), each["end_offset"] + 1)
                for each in await segments_of(proxy, topic)
            }
            assert {offset for offsets in void.values() for offset in offsets} == set(range(SHARED, SHARED + LOST))
            assert proxy.metric("tidegate_remote_log_alarms_total", topic=topic, reason="cut") > 0
            kept = [path for segment in filter(void.get, void) for path in (tmp_path / "tier").rglob(f"*{segment}*")]
            assert len(kept) == 2 * sum(map(bool, void.values()))
        finally:
            await asyncio.to_thread(cluster.start_broker, LEADER)
