"""Producers through `tidegate serve` go on with the next leader after one of three brokers was killed."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.support.rigs.steady_producers import Acknowledgements, java, librdkafka
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import tidegate_over

pytestmark = pytest.mark.integration

TIMEOUT_S = 300


async def until_acknowledged(producers: list[Acknowledgements], count: int) -> None:
    """Returns when every producer has `count` more acknowledgements than now."""
    before = {producer: len(producer) for producer in producers}
    async with asyncio.timeout(TIMEOUT_S):
        while any(len(producer) < before[producer] + count for producer in producers):  # noqa: ASYNC110 - other threads
            await asyncio.sleep(0.05)


def leader_of(cluster: KafkaCluster, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    return int(admin.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions[0].leader)


def end_offset(cluster: KafkaCluster, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": topic})
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=TIMEOUT_S)
    consumer.close()
    return int(end)


async def test_producers_find_the_next_leader_after_a_broker_was_killed(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    cluster = kafka_of_three
    create_topic(cluster.bootstrap_servers, topic_name, replicas=3)
    producers = [Acknowledgements("librdkafka"), Acknowledgements("Java")]
    with tidegate_over(cluster, tmp_path) as proxy, ExitStack() as stack:
        for produce, acknowledged in zip((librdkafka, java), producers, strict=True):
            stack.enter_context(produce(proxy.bootstrap_servers, topic_name, acknowledged))
        await until_acknowledged(producers, 10)
        leader = await asyncio.to_thread(leader_of, cluster, topic_name)
        await asyncio.to_thread(cluster.kill_broker, leader)
        try:
            await until_acknowledged(producers, 100)
            assert await asyncio.to_thread(leader_of, cluster, topic_name) != leader
        finally:
            await asyncio.to_thread(cluster.start_broker, leader)
        await asyncio.to_thread(stack.close)
    assert producers[0].errors == 0, "librdkafka retries until the next leader is there"
    assert await asyncio.to_thread(end_offset, cluster, topic_name) >= sum(map(len, producers))
