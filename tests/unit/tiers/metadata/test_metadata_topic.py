"""The metadata topic: fit or refused with what to do, written by its producer, and a partition of it for each topic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import ProduceRequest

from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from protocol.errors import ErrorCode
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.record_batches import batch_of
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.errors import BrokerError, RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_log import by_topic_id
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.topic.metadata_producer import ClockSkew, MetadataProducer
from tiers.metadata.topic.metadata_topic import (
    DEFAULT_TOPIC_NAME,
    MetadataTopic,
    MetadataTopicSettings,
    MetadataTopicUnfitError,
    open_metadata_topic,
)
from tiers.model.ids import TopicIdPartition

TOPIC = TopicMetadata("segments", UUID(int=7), {0: PartitionMetadata(0, 1, 5)})
SETTINGS = MetadataTopicSettings("segments", 1)


FIT = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime", "delete.retention.ms": "60000"}


@pytest.fixture
async def broker() -> AsyncIterator[ScriptedBroker]:
    async with ScriptedBroker() as broker:
        broker.topics = [TOPIC]
        has_configs(broker, FIT)
        yield broker


def has_configs(broker: ScriptedBroker, configs: Mapping[str, str], error_code: int = 0) -> None:
    async def answer(request: Any) -> DescribeConfigsResponse:
        result = DescribeConfigsResponse.DescribeConfigsResult
        entries = [
            result.DescribeConfigsResourceResult(
                name=name, value=value, read_only=False, config_source=1, is_sensitive=False, synonyms=[], config_type=0
            )
            for name, value in configs.items()
        ]
        resource = request.resources[0]
        described = result(
            error_code=error_code,
            error_message=None,
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            configs=entries,
        )
        return DescribeConfigsResponse(throttle_time_ms=0, results=[described])

    broker.answers[ApiKey.DESCRIBE_CONFIGS] = answer


async def opened(broker: ScriptedBroker, settings: MetadataTopicSettings = SETTINGS, *more: Any) -> MetadataTopic:
    client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
    try:
        return await open_metadata_topic(client, settings, 30_000, *more)
    finally:
        await client.close()


async def refusal_of(broker: ScriptedBroker, settings: MetadataTopicSettings) -> str:
    with pytest.raises(MetadataTopicUnfitError) as raised:
        await opened(broker, settings)
    return str(raised.value)


def shown_late(broker: ScriptedBroker) -> None:
    """The first broker that is asked knows the topic, and the second one does not yet."""

    def without_topics(response: Any) -> None:
        response.topics = []

    broker.script(ApiKey.METADATA)
    broker.script(ApiKey.METADATA, without_topics)


async def test_a_topic_that_somebody_made_a_moment_ago_is_waited_for(broker: ScriptedBroker) -> None:
    def not_heard_of(response: Any) -> None:
        response.results[0].error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    shown_late(broker)
    broker.script(ApiKey.DESCRIBE_CONFIGS, not_heard_of)
    assert await opened(broker) == MetadataTopic("cluster", "segments", TOPIC.topic_id, 1)
    assert len(broker.received(DescribeConfigsRequest)) == 2


@pytest.mark.parametrize("batches", [[], [batch_of(0, 1)]])
async def test_a_topic_without_records_is_as_good_as_a_missing_one(
    broker: ScriptedBroker, batches: list[bytes]
) -> None:
    """Another program may have created it in the place of a lost one."""

    async def refusal() -> str:
        return "the store holds segments"

    broker.logs[TOPIC.name, 0] = LocalLog(batches)
    if batches:
        assert (await opened(broker, SETTINGS, None, refusal)).topic_id == TOPIC.topic_id
    else:
        with pytest.raises(MetadataTopicUnfitError, match="the store holds segments"):
            await opened(broker, SETTINGS, None, refusal)


@pytest.mark.parametrize("has_state", [False, True])
async def test_another_number_of_partitions_names_what_to_do(broker: ScriptedBroker, has_state: bool) -> None:
    """A saved state of another count is not replaced."""
    saved = StateIdentity("cluster", TOPIC.topic_id, 50) if has_state else None
    with pytest.raises(MetadataTopicUnfitError) as refused:
        await opened(broker, MetadataTopicSettings("segments", 60), saved)
    said = str(refused.value)
    assert "60 are configured" in said
    assert "docs/recovery.md" in said
    assert ("when it had 50 partitions" in said) is has_state
    assert ("remote.log.metadata.topic.num.partitions" in said) is not has_state


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ({"cleanup.policy": "delete"}, "cleanup.policy=delete; it must be compact"),
        ({"message.timestamp.type": "CreateTime"}, "message.timestamp.type=CreateTime; it must be LogAppendTime"),
        ({"delete.retention.ms": "59999"}, "delete.retention.ms=59999; it must be at least 60000"),
    ],
)
@pytest.mark.parametrize("name", [DEFAULT_TOPIC_NAME, "segments"])
async def test_a_topic_of_another_kind_is_refused(
    broker: ScriptedBroker, name: str, configs: dict[str, str], said: str
) -> None:
    """The topic of Kafka's own tier has this name, and must not be altered."""
    broker.topics = [replace(TOPIC, name=name)]
    has_configs(broker, FIT | configs)
    refused = await refusal_of(broker, MetadataTopicSettings(name, 1))
    assert refused.startswith(f"topic {name} has {said}")
    is_warned = name == DEFAULT_TOPIC_NAME and "at least" not in said
    assert ("remote.log.metadata.topic.name to another name" in refused) is is_warned


async def test_the_topic_of_the_brokers_own_tier_is_refused(broker: ScriptedBroker) -> None:
    has_configs(broker, FIT | {"remote.log.storage.system.enable": "true"})
    await opened(broker)
    broker.topics = [replace(TOPIC, name=DEFAULT_TOPIC_NAME)]
    refused = await refusal_of(broker, MetadataTopicSettings(DEFAULT_TOPIC_NAME, 1))
    assert "set remote.log.metadata.topic.name to another name" in refused


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        (
            "segments",
            ErrorCode.TOPIC_AUTHORIZATION_FAILED,
            "configuration of topic segments cannot be read: give the proxy DESCRIBE_CONFIGS on the topic",
        ),
        (
            DEFAULT_TOPIC_NAME,
            ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
            "configuration of broker 1 cannot be read: give the proxy DESCRIBE_CONFIGS on the cluster",
        ),
    ],
)
async def test_a_configuration_that_the_broker_refuses_names_the_missing_right(
    broker: ScriptedBroker, name: str, code: ErrorCode, said: str
) -> None:
    broker.topics = [replace(TOPIC, name=name)]
    has_configs(broker, {}, code)
    with pytest.raises(BrokerError, match=said):
        await opened(broker, MetadataTopicSettings(name, 1))


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


def refused(response: Any) -> None:
    response.responses[0].partition_responses[0].error_code = ErrorCode.NOT_ENOUGH_REPLICAS


async def test_records_that_are_not_wanted_any_more_are_not_sent_again() -> None:
    wanted = [True, False]

    def check() -> None:
        if not wanted.pop(0):
            raise RemoteLogMetadataNotReadyError("the settings were changed")

    async with ScriptedBroker() as broker:
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        broker.topics = led_by(1, 1)
        broker.script(ApiKey.PRODUCE, refused)
        producer = MetadataProducer(client, MetadataTopic("cluster", "metadata", TOPIC_ID, 1))
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await producer.send(0, [(b"key", b"value")], 5_000, check)
        await client.close()
    assert len(broker.received(ProduceRequest)) == 1


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


@pytest.mark.parametrize(
    ("topic_id", "partition", "expected"),
    [
        ("12345678-9abc-def0-1234-56789abcdef0", 0, 11),
        ("12345678-9abc-def0-1234-56789abcdef0", 1, 2),
        ("00000000-0000-0000-0000-000000000001", 0, 35),
        ("ffffffff-ffff-ffff-ffff-ffffffffffff", 5, 0),
    ],
)
def test_the_metadata_partition_is_that_of_kafkas_formula(topic_id: str, partition: int, expected: int) -> None:
    assert by_topic_id(TopicIdPartition(UUID(topic_id), partition), 50) == expected
