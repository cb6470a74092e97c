"""The producer writes to a partition of the metadata topic as soon as its leader is back."""

from __future__ import annotations

from uuid import UUID

from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import ProduceRequest

from protocol.apis.metadata import PartitionMetadata
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.metadata.topic.metadata_producer import MetadataProducer
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
        topic = MetadataTopic("cluster", "metadata", TOPIC_ID, 1, 0)
        producer = MetadataProducer(client, topic, clock_ms=monotonic_ms)
        assert await producer.send(0, [(b"key", b"value")], 5_000) == 0
        await client.close()
    assert (len(broker.received(MetadataRequest)), len(broker.received(ProduceRequest))) == (2, 1)
