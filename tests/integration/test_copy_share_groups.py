"""Where share groups stand, asked of a real broker that has one."""

from __future__ import annotations

import pytest

from tests.servers.kafka import CONFIG_COMMAND, KafkaCluster
from tests.servers.producing import create_topic, produce, topic_id_partition
from tiers.broker.client import BrokerClient
from tiers.broker.share_groups import ClusterShareGroups

pytestmark = pytest.mark.integration
CONSOLE_SHARE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleShareConsumer"
SHARE_GROUP_COMMAND = "org.apache.kafka.tools.consumer.group.ShareGroupCommand"
TIMEOUT_MS = 20_000


async def test_the_lowest_start_offset_of_any_share_group_is_found(kafka: KafkaCluster, topic_name: str) -> None:
    bootstrap = ["--bootstrap-server", kafka.bootstrap_servers]
    create_topic(kafka.bootstrap_servers, topic_name, partitions=2)
    produce(kafka.bootstrap_servers, topic_name, [b"%d" % n for n in range(50)])
    client = BrokerClient([kafka.address()], client_id="test")
    await client.open()
    partition = await topic_id_partition(client, topic_name)
    groups = ClusterShareGroups(client)

    before = await groups.lowest_start(partition, TIMEOUT_MS)
    group = ["--entity-type", "groups", "--entity-name", topic_name]
    kafka.run_tool(CONFIG_COMMAND, *bootstrap, *group, "--alter", "--add-config", "share.auto.offset.reset=earliest")
    kafka.run_tool(
        CONSOLE_SHARE_CONSUMER, *bootstrap, "--topic", topic_name, "--group", topic_name, "--max-messages", "50"
    )
    after = await groups.lowest_start(partition, TIMEOUT_MS)
    await client.close()
    described = kafka.run_tool(SHARE_GROUP_COMMAND, *bootstrap, "--describe", "--offsets", "--group", topic_name).stdout

    assert before is None
    assert str(after) == start_offset_in(described, topic_name)


def start_offset_in(described: str, topic: str) -> str:
    """Of partition 0, from the table that Kafka's own tool prints."""
    header, *lines = [line.split() for line in described.splitlines() if line.strip()]
    rows = [dict(zip(header, line, strict=False)) for line in lines]
    return next(row["START-OFFSET"] for row in rows if row["TOPIC"] == topic and row["PARTITION"] == "0")
