"""A leader of the metadata topic still answers after its quorum is gone. Its answers alone make nothing fresh."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from tests.support.rigs.metadata_managers import TopicBasedManager
from tests.support.servers.kafka import KafkaCluster
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.broker.fetch import FetchPosition, fetch_raw
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.ids import TopicIdPartition

pytestmark = pytest.mark.integration
TIMEOUT_MS = 300_000
WITH_TOPIC_IDS = 10


async def in_sync(client: BrokerClient, topic_name: str) -> TopicMetadata | None:
    """Returns the topic if its leader itself knows that all replicas are in sync.

    A leader that is the only in-sync replica, as after a pause of the others, would be trusted. Any broker may get the
    question, and a broker may learn of the topic late."""
    known = (await client.metadata()).topics.get(topic_name)
    if known is None or (leader := known.partitions[0].leader_id) < 0:
        return None
    said = await as_known_by(client, leader, topic_name)
    return known if said == (leader, 3) else None


async def as_known_by(client: BrokerClient, node: int, topic_name: str) -> tuple[int, int]:
    """Returns the leader of the first partition, and the number of its in-sync replicas."""
    asked = MetadataRequest.MetadataRequestTopic(name=topic_name)
    message = MetadataRequest(topics=[asked], allow_auto_topic_creation=False)
    response = await client.request(node, message, min_version=WITH_TOPIC_IDS)
    ((first, *_),) = (topic.partitions or [None] for topic in response.topics)
    return (-1, 0) if first is None else (first.leader_id, len(first.isr_nodes))


async def with_a_leader_alone(cluster: KafkaCluster, client: BrokerClient, topic_name: str) -> TopicMetadata:
    """Pauses every broker but the leader, and returns the topic. The leader still has all replicas in sync.

    If the machine stands still between two pauses, then the quorum removes a paused replica from the ISR. In that case
    the brokers resume, and the next attempt begins."""
    async with asyncio.timeout(TIMEOUT_MS / 1000):
        while True:
            topic = await in_sync(client, topic_name)
            if topic is not None:
                leader = topic.partitions[0].leader_id
                others = [node for node in (1, 2, 3) if node != leader]
                for node in others:
                    cluster.pause_broker(node)
                if (await as_known_by(client, leader, topic_name))[1] == 3:
                    return topic
                for node in others:
                    cluster.resume_broker(node)
            await asyncio.sleep(0.05)


async def test_a_leader_whose_quorum_is_gone_makes_nothing_fresh(
    kafka_of_three: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    """Every broker is a controller too, so the quorum stops together with the other brokers."""
    cluster = kafka_of_three
    client = BrokerClient([cluster.address(node) for node in (1, 2, 3)], client_id="test")
    settings = TopicBasedSettings(
        tmp_path / "state",
        topic=MetadataTopicSettings(topic_name, 2),
        is_member=False,
        open_timeout_ms=TIMEOUT_MS,
    )
    manager = TopicBasedManager(client, settings)
    await manager.log.open()
    try:
        follower = manager.log.follower
        await follower.ensure_fresh(0, 0, TIMEOUT_MS)
        topic = await with_a_leader_alone(cluster, client, topic_name)
        partition = TopicIdPartition(topic.topic_id, 0, topic_name)
        leader = topic.partitions[0].leader_id
        paused_at_ms = monotonic_ms()
        try:
            with pytest.raises(RemoteLogMetadataNotReadyError):
                await follower.ensure_fresh(0, 0, 2_000)
            (answer,) = await fetch_raw(
                client, leader, [FetchPosition(partition.topic_id, 0, 0)], max_bytes=1, timeout_ms=TIMEOUT_MS
            )
            fresh_at_ms = follower.fresh_at_ms(0)
        finally:
            for node in {1, 2, 3} - {leader}:
                cluster.resume_broker(node)
        assert answer.error == ErrorCode.NONE
        assert fresh_at_ms is not None
        assert fresh_at_ms <= paused_at_ms
        await follower.ensure_fresh(0, 0, TIMEOUT_MS)
    finally:
        await manager.log.close()
        await client.close()
