"""A broker that is killed forgets a DeleteRecords, so the copier repeats it."""

from __future__ import annotations

import asyncio

from confluent_kafka.admin import AdminClient

from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values, topic_id_partition
from tiers.broker.client import BrokerClient
from tiers.log.broker_log import BrokerLogSource

TIMEOUT_MS = 300_000


async def test_a_killed_broker_forgets_a_deletion(kafka_of_three: KafkaCluster, topic_name: str) -> None:
    """Kafka checkpoints log starts once a minute. The leader epochs of the records do not come back with them."""
    cluster = kafka_of_three
    await asyncio.to_thread(create_topic, cluster.bootstrap_servers, topic_name, config={"min.insync.replicas": "1"})
    listed = AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(topic_name, 300)
    (node_id,) = listed.topics[topic_name].partitions[0].replicas

    async def kill_broker() -> None:
        await asyncio.to_thread(cluster.kill_broker, node_id)
        await asyncio.to_thread(cluster.start_broker, node_id)

    await kill_broker()  # now the leader epoch is 1 at least
    await asyncio.to_thread(produce, cluster.bootstrap_servers, topic_name, random_values(900))
    client = BrokerClient([cluster.address(each) for each in cluster.brokers], client_id="test")
    try:
        source, partition = BrokerLogSource(client), await topic_id_partition(client, topic_name)

        async def delete_and_check() -> int:
            epoch = (await source.bounds(partition, TIMEOUT_MS)).leader_epoch
            assert await source.delete_records(partition, 123, epoch, TIMEOUT_MS, lambda: None) == 123
            return (await source.bounds(partition, TIMEOUT_MS)).log_start_offset

        assert await delete_and_check() == 123
        await kill_broker()
        assert (await source.bounds(partition, TIMEOUT_MS)).log_start_offset < 123
        assert await delete_and_check() == 123
    finally:
        await client.close()
