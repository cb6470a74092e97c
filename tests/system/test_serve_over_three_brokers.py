"""A leader of three brokers behind `tidegate serve` dies during a read from offset 0."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from tests.support.rigs.strict_consumer import consumer_at, read, until_trimmed
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import tidegate_over

pytestmark = pytest.mark.integration

RECORDS = 8_000


def leader_of(cluster: KafkaCluster, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    return int(admin.list_topics(topic, timeout=300).topics[topic].partitions[0].leader)


async def test_a_leader_that_is_killed_during_a_backfill_costs_time_only(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    cluster = kafka_of_three
    create_topic(cluster.bootstrap_servers, topic_name, replicas=3)
    values = random_values(RECORDS)
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
        "remote.log.visible.after.ms": 2000,
    }
    with tidegate_over(cluster, tmp_path, tiered=[topic_name], settings=settings) as proxy:
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, values)
        await asyncio.to_thread(until_trimmed, cluster, topic_name, RECORDS // 2)
        leader = await asyncio.to_thread(leader_of, cluster, topic_name)
        with consumer_at(proxy.bootstrap_servers, topic_name, 0) as consumer:
            found = await asyncio.to_thread(read, consumer, 500)
            await asyncio.to_thread(cluster.kill_broker, leader)
            try:
                found += await asyncio.to_thread(read, consumer, RECORDS - 500)
                more = random_values(100)
                await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, more)
                found += await asyncio.to_thread(read, consumer, len(more))
            finally:
                await asyncio.to_thread(cluster.start_broker, leader)
        assert found == list(enumerate(values + more))
        assert proxy.metric("tidegate_request_latency_seconds_count", api="Fetch", tier="remote") > 0
