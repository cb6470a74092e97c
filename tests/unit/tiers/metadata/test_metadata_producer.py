"""The producer of the metadata topic, and how far the brokers' clock is ahead of its own."""

from __future__ import annotations

from uuid import UUID

import pytest
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import ProduceRequest

from protocol.apis.metadata import PartitionMetadata
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.metadata.topic.metadata_producer import ClockSkew, MetadataProducer
from tiers.metadata.topic.metadata_topic import MetadataTopic

TOPIC_ID = UUID(int=1)


def led_by(node_id: int, epoch: int) -> list[TopicMetadata]:
    return [TopicMetadata("metadata", TOPIC_ID, {0: PartitionMetadata(0, node_id, epoch)})]


async def test_a_missing_leader_is_asked_for_again() -> None:
    async with ScriptedBroker() as broker:
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        broker.topics = led_by(-1, 1)
        await client.open()
        broker.topics = led_by(1, 2)
        topic = MetadataTopic("cluster", "metadata", TOPIC_ID, 1)
        producer = MetadataProducer(client, topic)
        assert await producer.send(0, [(b"key", b"value")], 5_000) == 0
        await client.close()
    assert (len(broker.received(MetadataRequest)), len(broker.received(ProduceRequest))) == (2, 1)


@pytest.mark.parametrize(
    ("appended_after_ms", "set_by_ms", "skew_ms"),
    [(0, 0, 0), (40, 0, 0), (100, 0, 0), (101, 0, 1), (-1, 0, -1), (70_000, 0, 69_900), (0, 86_400_000, -86_400_000)],
)
def test_the_clocks_differ_by_what_lies_outside_of_a_request(
    appended_after_ms: int, set_by_ms: int, skew_ms: int
) -> None:
    """`set_by_ms`: the clock is set after the measurement."""
    now_ms, wall_ahead_ms = 5_000, 1_700_000_000_000
    skew = ClockSkew(lambda: now_ms, lambda: now_ms + wall_ahead_ms)
    sent = skew.now()
    skew.observe(sent, -1)
    assert skew.skew_ms() is None, "a topic without LogAppendTime"
    now_ms += 100
    skew.observe(sent, sent.wall_ms + appended_after_ms)
    now_ms += 3_600_000
    wall_ahead_ms += set_by_ms
    assert skew.skew_ms() == skew_ms
