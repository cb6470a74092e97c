"""A leader of the metadata topic whose quorum is gone answers as ever; its word alone makes nothing fresh."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from tests.servers.kafka import KafkaCluster
from tests.servers.producing import topic_id_partition
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.fetch import FetchPosition, fetch_raw
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic_based import TopicBasedRemoteLogMetadataManager, TopicBasedSettings

pytestmark = pytest.mark.integration
TIMEOUT_MS = 60_000


async def test_a_leader_whose_quorum_is_gone_makes_nothing_fresh(
    kafka_of_three: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    """Every broker is a controller too: with the others, the quorum stands still."""
    cluster = kafka_of_three
    client = BrokerClient([cluster.address(node) for node in (1, 2, 3)], client_id="test")
    settings = TopicBasedSettings(
        tmp_path / "state", prefix=topic_name, topic=MetadataTopicSettings(topic_name, 2), is_member=False
    )
    manager = TopicBasedRemoteLogMetadataManager(client, settings)
    await manager.open()
    try:
        follower = manager.follower
        await follower.ensure_fresh(0, 0, TIMEOUT_MS)
        partition = await topic_id_partition(client, topic_name)
        leader = (await client.leader_of(partition)).node_id
        others = [node for node in (1, 2, 3) if node != leader]
        for node in others:
            cluster.pause_broker(node)
        paused_at_ms = monotonic_ms()
        try:
            with pytest.raises(RemoteLogMetadataNotReadyError):
                await follower.ensure_fresh(0, 0, 2_000)
            (answer,) = await fetch_raw(
                client, leader, [FetchPosition(partition.topic_id, 0, 0)], max_bytes=1, timeout_ms=TIMEOUT_MS
            )
            fresh_at_ms = follower.fresh_at_ms(0)
        finally:
            for node in others:
                cluster.resume_broker(node)
        assert answer.error == ErrorCode.NONE
        assert fresh_at_ms is not None
        assert fresh_at_ms <= paused_at_ms
        await follower.ensure_fresh(0, 0, 60_000)
    finally:
        await manager.close()
        await client.close()
