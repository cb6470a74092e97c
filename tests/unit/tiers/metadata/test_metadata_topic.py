"""The metadata topic while some brokers do not know it yet."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse

from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from protocol.errors import ErrorCode
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.record_batches import batch_of
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.errors import BrokerError
from tiers.metadata.topic.metadata_topic import (
    DEFAULT_TOPIC_NAME,
    MetadataTopicSettings,
    MetadataTopicUnfitError,
    open_metadata_topic,
)

TOPIC = TopicMetadata("segments", UUID(int=7), {0: PartitionMetadata(0, 1, 5)})
SETTINGS = MetadataTopicSettings("segments", 1)


FIT = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime", "delete.retention.ms": "60000"}


async def fit(request: Any) -> DescribeConfigsResponse:
    return said_of(request, FIT)


async def as_kafkas_own(request: Any) -> DescribeConfigsResponse:
    return said_of(request, {**FIT, "cleanup.policy": "delete", "message.timestamp.type": "CreateTime"})


def said_of(request: Any, configs: dict[str, str]) -> DescribeConfigsResponse:
    result = DescribeConfigsResponse.DescribeConfigsResult
    entries = [
        result.DescribeConfigsResourceResult(
            name=name, value=value, read_only=False, config_source=1, is_sensitive=False, synonyms=[], config_type=0
        )
        for name, value in configs.items()
    ]
    resource = request.resources[0]
    return DescribeConfigsResponse(
        throttle_time_ms=0,
        results=[
            result(
                error_code=0,
                error_message=None,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
                configs=entries,
            )
        ],
    )


def without_topics(response: Any) -> None:
    response.topics = []


def not_heard_of(response: Any) -> None:
    response.results[0].error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_topic_that_somebody_made_a_moment_ago_is_waited_for() -> None:
    async with ScriptedBroker() as broker:
        broker.topics = [TOPIC]
        broker.answers[ApiKey.DESCRIBE_CONFIGS] = fit
        broker.script(ApiKey.METADATA)
        broker.script(ApiKey.METADATA, without_topics)
        broker.script(ApiKey.DESCRIBE_CONFIGS, not_heard_of)
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        opened = await open_metadata_topic(client, SETTINGS, 30_000)
        await client.close()
    assert (opened.topic_id, opened.partition_count) == (TOPIC.topic_id, 1)
    assert len(broker.received(DescribeConfigsRequest)) == 2


async def test_a_new_topic_that_no_broker_shows_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In time for the answers of a busy machine, and not for a second look."""
    monkeypatch.setattr("tiers.metadata.topic.metadata_topic._FIRST_PAUSE_MS", 60_000)
    async with ScriptedBroker() as broker:
        broker.topics = [TOPIC]
        broker.answers[ApiKey.DESCRIBE_CONFIGS] = fit
        broker.script(ApiKey.METADATA)
        broker.script(ApiKey.METADATA, without_topics)
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        with pytest.raises(BrokerError, match="does not show topic segments"):
            await open_metadata_topic(client, SETTINGS, 30_000)
        await client.close()


@pytest.mark.parametrize(("batches", "is_refused"), [([], True), ([batch_of(0, 1)], False)])
async def test_a_topic_without_records_is_as_good_as_a_missing_one(batches: list[bytes], is_refused: bool) -> None:
    """Another program may have created it in the place of a lost one."""

    async def refusal() -> str:
        return "the store holds segments"

    async with ScriptedBroker() as broker:
        broker.topics = [TOPIC]
        broker.logs[TOPIC.name, 0] = LocalLog(batches)
        broker.answers[ApiKey.DESCRIBE_CONFIGS] = fit
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        if is_refused:
            with pytest.raises(MetadataTopicUnfitError, match="the store holds segments"):
                await open_metadata_topic(client, SETTINGS, 30_000, None, refusal)
        else:
            assert (await open_metadata_topic(client, SETTINGS, 30_000, None, refusal)).topic_id == TOPIC.topic_id
        await client.close()


@pytest.mark.parametrize(("name", "is_warned"), [(DEFAULT_TOPIC_NAME, True), ("segments", False)])
async def test_the_topic_of_kafkas_own_tier_is_not_to_be_altered(name: str, is_warned: bool) -> None:
    async with ScriptedBroker() as broker:
        broker.topics = [TopicMetadata(name, UUID(int=7), {0: PartitionMetadata(0, 1, 5)})]
        broker.answers[ApiKey.DESCRIBE_CONFIGS] = as_kafkas_own
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        with pytest.raises(MetadataTopicUnfitError) as raised:
            await open_metadata_topic(client, MetadataTopicSettings(name, 1), 30_000)
        await client.close()
    said = str(raised.value)
    assert said.startswith(f"topic {name} has cleanup.policy=delete; it must be compact")
    assert ("If the topic is Kafka's, do not alter it: set remote.log.metadata.topic.name" in said) is is_warned


async def test_another_number_of_partitions_names_the_setting_and_what_to_do() -> None:
    async with ScriptedBroker() as broker:
        broker.topics = [TOPIC]
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        with pytest.raises(MetadataTopicUnfitError) as raised:
            await open_metadata_topic(client, MetadataTopicSettings(TOPIC.name, 50), 30_000)
        await client.close()
    for said in (
        "50 are configured (remote.log.metadata.topic.num.partitions)",
        "Set the number that the topic was created with",
        "rebuild the metadata into a new topic: see 'The metadata topic is lost' in docs/recovery.md",
        "delete it and the folder state.path",
    ):
        assert said in str(raised.value)


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
    name: str, code: ErrorCode, said: str
) -> None:
    async def refuse(request: Any) -> DescribeConfigsResponse:
        response = said_of(request, {})
        response.results[0].error_code = code
        return response

    async with ScriptedBroker() as broker:
        broker.topics = [TopicMetadata(name, UUID(int=7), {0: PartitionMetadata(0, 1, 5)})]
        broker.answers[ApiKey.DESCRIBE_CONFIGS] = refuse
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        with pytest.raises(BrokerError, match=said):
            await open_metadata_topic(client, MetadataTopicSettings(name, 1), 30_000)
        await client.close()
