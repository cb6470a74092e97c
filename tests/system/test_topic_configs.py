"""Kafka's own tools and clients manage tier settings through `tidegate serve` (docs/semantics.md 9.4)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import KafkaError, NewPartitions
from kafka.protocol.admin import DescribeConfigsRequest

from tests.support.clients.kafka_tools import KafkaTools
from tests.support.rigs.strict_consumer import consumer_at, local_log_start, read, until_trimmed
from tests.support.rigs.topic_config_client import alter, code_of, described
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer
from tests.support.servers.producing import create_topic, delete_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tiers.tasks.deletion.failed_deletions import FAILED_DELETIONS_TOPIC

pytestmark = pytest.mark.integration

TIMEOUT_S = 300.0
METADATA_TOPIC = "__remote_log_metadata_of_topic_configs"
TOPICS, CONFIGS = "kafka-topics", "kafka-configs"
RULE = """
[[topics]]
name = "*"
remote.storage.enable = false
segment.bytes = 60000
segment.ms = "1s"
"""


@pytest.fixture
def proxy(kafka: KafkaCluster, tmp_path: Path) -> Iterator[TidegateProcess]:
    """A proxy whose settings file tiers no topic, but has segment sizes for all topics."""
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": METADATA_TOPIC,
        "remote.log.visible.after.ms": 1000,
    }
    proxy = tidegate_over(kafka, tmp_path, settings=settings)
    proxy.config.write_text(proxy.config.read_text() + RULE)
    with proxy:
        yield proxy


def tool(tools: KafkaTools, script: str, bootstrap: str, *args: str) -> tuple[int, str]:
    done = tools.run(script, bootstrap, *args)
    return done.exit_code, done.output + done.errors


async def test_stock_tools_tier_a_topic_and_end_it(
    kafka: KafkaCluster, tools: KafkaTools, proxy: TidegateProcess, tmp_path: Path, topic_name: str
) -> None:
    topic, bootstrap = topic_name, proxy.bootstrap_servers

    async def run(main: str, *args: str, at: str = bootstrap) -> tuple[int, str]:
        return await asyncio.to_thread(tool, tools, main, at, *args)

    code, output = await run(
        TOPICS, "--create", "--topic", topic, "--config", "remote.storage.enable=true"
    )  # fmt: skip
    assert code == 0, output
    assert described(bootstrap, topic)["remote.storage.enable"].value == "true"
    code, output = await run(CONFIGS, "--alter", "--topic", topic, "--add-config", "local.retention.bytes=1")
    assert code == 0, output
    code, output = await run(TOPICS, "--describe", "--topic", topic)
    assert "remote.storage.enable=true" in output
    assert "local.retention.bytes=1" in output
    assert {"remote.storage.enable", "local.retention.bytes"} <= described(bootstrap, topic).keys()
    on_the_broker = described(kafka.bootstrap_servers, topic)
    assert on_the_broker["remote.storage.enable"].value == "false"
    assert on_the_broker["local.retention.bytes"].value == "-2"

    values = random_values(500)
    await asyncio.to_thread(produce, bootstrap, topic, values)
    await asyncio.to_thread(until_trimmed, kafka, topic, 300)
    with consumer_at(bootstrap, topic, 0) as consumer:
        assert await asyncio.to_thread(read, consumer, 500) == list(enumerate(values))

    code, output = await run(CONFIGS, "--alter", "--topic", topic, "--add-config", "remote.storage.enable=false")
    assert code != 0
    assert "It is invalid to disable remote storage without deleting remote data." in output
    disable = "remote.storage.enable=false,remote.log.delete.on.disable=true"
    code, output = await run(CONFIGS, "--alter", "--topic", topic, "--add-config", disable)
    assert code == 0, output
    async with asyncio.timeout(TIMEOUT_S):
        while any((tmp_path / "tier").rglob("*.log")):  # noqa: ASYNC110 - another process deletes them
            await asyncio.sleep(0.2)
    start = local_log_start(kafka, topic)
    with consumer_at(bootstrap, topic, start) as consumer:
        assert await asyncio.to_thread(read, consumer, 500 - start) == list(enumerate(values))[start:]
        low, _ = consumer.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S)
        assert low == start


async def test_stock_tools_list_and_unset_what_a_topic_was_given(
    tools: KafkaTools, proxy: TidegateProcess, topic_name: str
) -> None:
    bootstrap, shown = proxy.bootstrap_servers, f"Topic: {topic_name}\t"
    config = {"remote.storage.enable": "true", "local.retention.ms": "5"}
    create_topic(bootstrap, topic_name, config=config)

    async def run(script: str, *args: str) -> str:
        return (await asyncio.to_thread(tool, tools, script, bootstrap, *args))[1]

    async def overrides() -> str:
        output = await run(TOPICS, "--describe", "--topics-with-overrides")
        return next(line for line in output.splitlines() if line.startswith(shown))

    async def unset(keys: str, *more: str) -> str:
        return await run(CONFIGS, "--alter", "--topic", topic_name, "--delete-config", keys, *more)

    line = await overrides()
    assert "remote.storage.enable=true" in line
    assert "local.retention.ms=5" in line
    described = await run(CONFIGS, "--describe", "--topic", topic_name)
    assert "local.retention.ms=5 sensitive=false synonyms={DYNAMIC_TOPIC_CONFIG:local.retention.ms=5," in described
    keys = "local.retention.ms,remote.storage.enable"
    assert "It is invalid to disable remote storage without deleting remote data." in await unset(keys)
    done = "Completed updating config"
    assert done in await unset(keys, "--add-config", "remote.log.delete.on.disable=true")
    assert done in await unset("remote.log.delete.on.disable")
    line = await overrides()
    assert "remote.storage.enable=false" in line, "the user's word allows the remote log to be deleted"
    assert "remote.log." not in line
    assert "local.retention" not in line


async def test_settings_are_shown_as_a_broker_shows_its_own(
    kafka: KafkaCluster, proxy: TidegateProcess, topic_name: str
) -> None:
    """The settings are those that a broker accepts without a tier. The broker sets one topic, the proxy the other."""
    theirs, ours = f"{topic_name}-theirs", f"{topic_name}-ours"
    config = {"local.retention.ms": "5", "local.retention.bytes": "7", "max.message.bytes": "5000"}
    create_topic(kafka.bootstrap_servers, theirs, config=config)
    create_topic(proxy.bootstrap_servers, ours, config=config)

    def shown(address: tuple[str, int], topic: str, version: int, keys: list[str] | None) -> dict[str, object]:
        request = DescribeConfigsRequest(
            resources=[
                DescribeConfigsRequest.DescribeConfigsResource(
                    resource_type=2, resource_name=topic, configuration_keys=keys
                )
            ],
            include_synonyms=True,
            include_documentation=True,
        )
        with Peer(address) as peer:
            (result,) = peer.ask(request, version).results
        assert result.error_code == 0
        return {entry.name: entry.to_dict() for entry in result.configs}

    def compare() -> None:
        for version in (1, 2, 3, 4):
            for keys in (None, [], ["local.retention.ms", "remote.storage.enable"], ["max.message.bytes", "unknown"]):
                expected = shown(kafka.address(), theirs, version, keys)
                assert shown(proxy.address, ours, version, keys) == expected, (version, keys)

    await asyncio.to_thread(compare)


async def test_stock_tools_are_told_that_a_compacted_topic_cannot_be_tiered(
    kafka: KafkaCluster, tools: KafkaTools, proxy: TidegateProcess, topic_name: str
) -> None:
    args = ["--create", "--topic", topic_name, "--config", "remote.storage.enable=true", "--config"]
    code, output = await asyncio.to_thread(
        tool, tools, TOPICS, proxy.bootstrap_servers, *args, "cleanup.policy=compact"
    )
    assert code != 0
    refusal = "InvalidConfigurationException: Remote log storage only supports topics with cleanup.policy=delete"
    assert refusal in output, output
    assert topic_name not in AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(timeout=120).topics


@pytest.fixture
def failed_deletions(kafka: KafkaCluster) -> Iterator[str]:
    create_topic(kafka.bootstrap_servers, FAILED_DELETIONS_TOPIC)
    yield FAILED_DELETIONS_TOPIC
    delete_topic(kafka.bootstrap_servers, FAILED_DELETIONS_TOPIC)


async def test_the_topics_of_the_remote_log_are_not_for_clients_to_change(
    proxy: TidegateProcess, topic_name: str, failed_deletions: str
) -> None:
    bootstrap = proxy.bootstrap_servers
    create_topic(bootstrap, topic_name)
    await asyncio.to_thread(produce, bootstrap, topic_name, [b"it has a leader"])
    refused = KafkaError.TOPIC_AUTHORIZATION_FAILED

    def attempt() -> dict[str, list[int]]:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        topics = [METADATA_TOPIC, failed_deletions, topic_name]
        widened = admin.create_partitions([NewPartitions(topic, 2 if topic == topic_name else 99) for topic in topics])
        trimmed = admin.delete_records([TopicPartition(topic, 0, 0) for topic in topics])
        codes = {
            "alter": alter(bootstrap, {topic: {"retention.ms": "600000"} for topic in topics}),
            "create partitions": [code_of(widened[topic]) for topic in topics],
            "delete records": [code_of(trimmed[TopicPartition(topic, 0)]) for topic in topics],
        }
        deleted = admin.delete_topics(topics)
        codes["delete"] = [code_of(deleted[topic]) for topic in topics]
        return codes

    codes = await asyncio.to_thread(attempt)
    assert codes == {key: [refused, refused, 0] for key in ("alter", "create partitions", "delete records", "delete")}

    def names() -> set[str]:
        return set(AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=120).topics)

    # The broker learns of a deletion shortly after the controller.
    await asyncio.to_thread(until, lambda: topic_name not in names())
    assert {METADATA_TOPIC, failed_deletions} <= names()
