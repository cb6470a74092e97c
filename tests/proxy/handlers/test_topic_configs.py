"""Tier settings on their way: what goes to the broker, what is recorded, what the client is told; every version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

from protocol.header import build_request_header, build_response_header, parse_request_header, response_body_position
from proxy.broker_configs import BrokerValue
from proxy.exchange import Forward, Prepare
from proxy.handlers.alter_configs import UNKNOWN_KEY, AlterConfigsHandler
from proxy.handlers.base import FetchSettings, Spawn
from proxy.handlers.describe_configs import DescribeConfigsHandler
from proxy.handlers.metadata_topic_guard import MetadataTopicGuard
from proxy.topic_tier_configs import TopicTierConfigs
from tests.fakes.broker.cluster import FakeCluster
from tests.fakes.broker.exchange import FakeExchange
from tests.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tiers.errors import BrokerError, RemoteLogMetadataError
from tiers.manager.settings import TopicRule
from tiers.manager.topic_tier_config import BROKER_DEFAULTS
from tiers.model.ids import TopicIdPartition

ORDERS, RULED = UUID(int=1), UUID(int=2)
METADATA_TOPIC = "__remote_log_metadata"
ENABLE, LOCAL_MS, OTHER = "remote.storage.enable", "local.retention.ms", "max.message.bytes"
Answers = Mapping[str, int]
"""The broker's error codes by topic."""


class Configs:
    """The brokers' side of a topic's configuration."""

    def __init__(self) -> None:
        self.values = dict(BROKER_DEFAULTS)
        self.is_reachable = True

    async def of_topics(self, topics: Sequence[str], timeout_ms: int) -> Mapping[str, Mapping[str, BrokerValue]]:
        defaults = await self.defaults(timeout_ms)
        values = {key: BrokerValue(value, BROKER_DEFAULTS[key]) for key, value in defaults.items()}
        return dict.fromkeys(topics, values)

    async def defaults(self, timeout_ms: int) -> Mapping[str, str]:
        if not self.is_reachable:
            raise BrokerError("no broker answers", retriable=True)
        return self.values


class Bench:
    def __init__(self, spawn: Spawn) -> None:
        self.cluster = FakeCluster(topics={"orders": ORDERS, "ruled": RULED})
        self.metadata = InMemoryRemoteLogMetadataManager()
        self.brokers = Configs()
        rules = [TopicRule("ruled", local_retention_bytes=7)]
        settings = FetchSettings(metadata_timeout_ms=50)
        configs = TopicTierConfigs(self.cluster, self.brokers, self.metadata, settings, rules, METADATA_TOPIC)
        self.alter = AlterConfigsHandler(configs, spawn)
        self.describe = DescribeConfigsHandler(configs)

    async def pass_through(self, handler: Any, request: Any, version: int, response_class: Any, answer: Any) -> Any:
        """`answer` makes the broker's response of the request as it came to it. Both are kafka-python's objects."""
        api_key = request.API_KEY
        frame = build_request_header(api_key, version, 9, "test") + request.encode(version=version)
        action, state = handler.on_request(FakeExchange(self.cluster, frame))
        if isinstance(action, Prepare):
            action = await action.forward()
        assert isinstance(action, Forward)
        body = bytes(action.frame[parse_request_header(action.frame).body_position :])
        seen = type(request).decode(body, version=version)
        payload = build_response_header(api_key, version, 9) + answer(seen).encode(version=version)
        if state is None:
            return seen, response_class.decode(
                payload[response_body_position(api_key, version, payload) :], version=version
            )
        result = state.on_response(memoryview(payload))
        out = b"".join(await result if asyncio.iscoroutine(result) else result)
        return seen, response_class.decode(out[response_body_position(api_key, version, out) :], version=version)

    def own(self, topic_id: UUID = ORDERS) -> Mapping[str, str]:
        return self.metadata.topic_tier_config(topic_id)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as group:
        yield Bench(group.create_task)


def incremental(topics: Mapping[str, Sequence[tuple[str, int, str | None]]], *, validate_only: bool = False) -> Any:
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource
    return IncrementalAlterConfigsRequest(
        resources=[
            resource(
                resource_type=2,
                resource_name=topic,
                configs=[
                    resource.AlterableConfig(name=key, config_operation=operation, value=value)
                    for key, operation, value in changes
                ],
            )
            for topic, changes in topics.items()
        ],
        validate_only=validate_only,
    )


def altered(response_class: Any, codes: Answers) -> Any:
    """Answers every resource; what is refused upstream by the key that nobody knows is INVALID_CONFIG."""

    def answer(seen: Any) -> Any:
        one = response_class.AlterConfigsResourceResponse
        responses = []
        for resource in seen.resources:
            poisoned = any(config.name == UNKNOWN_KEY for config in resource.configs)
            code = codes.get(resource.resource_name, 40 if poisoned else 0)
            responses.append(
                one(error_code=code, error_message=None, resource_type=2, resource_name=resource.resource_name)
            )
        return response_class(throttle_time_ms=0, responses=responses)

    return answer


def sent(seen: Any) -> dict[str, list[str]]:
    return {one.resource_name: [config.name for config in one.configs] for one in seen.resources}


def codes_of(response: Any) -> dict[str, int]:
    return {one.resource_name: one.error_code for one in response.responses}


async def alter(bench: Bench, request: Any, version: int = 1, codes: Answers | None = None) -> tuple[Any, Any]:
    response = IncrementalAlterConfigsResponse
    seen, answer = await bench.pass_through(bench.alter, request, version, response, altered(response, codes or {}))
    return seen, answer


@pytest.mark.parametrize("version", [0, 1])
async def test_tier_settings_are_taken_out_and_recorded(bench: Bench, version: int) -> None:
    request = incremental(
        {"orders": [(ENABLE, 0, "TRUE"), (OTHER, 0, "5"), (LOCAL_MS, 0, "60")], "ruled": [(OTHER, 0, "6")]}
    )
    seen, response = await alter(bench, request, version)
    assert sent(seen) == {"orders": [OTHER], "ruled": [OTHER]}
    assert codes_of(response) == {"orders": 0, "ruled": 0}
    assert bench.own() == {ENABLE: "true", LOCAL_MS: "60"}
    await alter(bench, incremental({"orders": [(LOCAL_MS, 1, None)]}), version)
    assert bench.own() == {ENABLE: "true"}


@pytest.mark.parametrize("code", [29, 3, 41])
async def test_what_the_broker_refuses_is_not_recorded(bench: Bench, code: int) -> None:
    seen, response = await alter(bench, incremental({"orders": [(ENABLE, 0, "true")]}), codes={"orders": code})
    assert sent(seen) == {"orders": []}
    assert codes_of(response) == {"orders": code}
    assert bench.own() == {}


async def test_validate_only_records_nothing(bench: Bench) -> None:
    request = incremental({"orders": [(ENABLE, 0, "true")], "ruled": [(LOCAL_MS, 0, "x")]}, validate_only=True)
    _, response = await alter(bench, request)
    assert codes_of(response) == {"orders": 0, "ruled": 40}
    assert bench.own() == {}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([(LOCAL_MS, 0, "604800001"), (ENABLE, 0, "true")], 40),
        ([(LOCAL_MS, 0, "many")], 40),
        ([(LOCAL_MS, 2, "1")], 40),
        ([(LOCAL_MS, 0, None)], 42),
        ([(LOCAL_MS, 0, "1"), (LOCAL_MS, 0, "2")], 42),
        ([(ENABLE, 0, "true"), ("cleanup.policy", 2, "compact")], 40),
    ],
)
async def test_a_refused_topic_leaves_the_others_alone(
    bench: Bench, changes: list[tuple[str, int, str | None]], code: int
) -> None:
    seen, response = await alter(bench, incremental({"orders": changes, "ruled": [(LOCAL_MS, 0, "5")]}))
    assert sent(seen) == {"orders": [UNKNOWN_KEY], "ruled": []}
    assert codes_of(response) == {"orders": code, "ruled": 0}
    assert response.responses[0].error_message
    assert bench.own() == {}
    assert bench.own(RULED) == {LOCAL_MS: "5"}


async def test_who_may_not_alter_a_topic_learns_nothing_of_its_settings(bench: Bench) -> None:
    _, response = await alter(bench, incremental({"orders": [(LOCAL_MS, 0, "many")]}), codes={"orders": 29})
    assert codes_of(response) == {"orders": 29}
    assert response.responses[0].error_message is None


async def test_a_tiered_topic_is_guarded_against_what_would_end_its_tiering(bench: Bench) -> None:
    for topic in ("orders", "ruled"):
        if topic == "orders":
            await bench.metadata.change_topic_tier_config(ORDERS, topic, {ENABLE: "true", LOCAL_MS: "500"})
        _, response = await alter(bench, incremental({topic: [("cleanup.policy", 0, "compact")]}))
        assert codes_of(response) == {topic: 40}
    _, response = await alter(bench, incremental({"orders": [("retention.ms", 0, "499")]}))
    assert codes_of(response) == {"orders": 40}
    _, response = await alter(bench, incremental({"ruled": [("retention.ms", 0, "1")]}))
    assert codes_of(response) == {"ruled": 0}


async def test_what_cannot_be_checked_or_recorded_is_to_be_tried_again(bench: Bench) -> None:
    bench.brokers.is_reachable = False
    request = incremental({"orders": [(ENABLE, 0, "true")]})
    assert codes_of((await alter(bench, request))[1]) == {"orders": 7}
    bench.brokers.is_reachable = True
    bench.metadata.fail_writes = RemoteLogMetadataError("not now")
    assert codes_of((await alter(bench, request))[1]) == {"orders": 7}
    bench.metadata.fail_writes = None
    bench.metadata.fresh = False
    assert codes_of((await alter(bench, request))[1]) == {"orders": 7}
    assert codes_of((await alter(bench, incremental({"orders": [(OTHER, 0, "5")]})))[1]) == {"orders": 0}


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_a_legacy_alter_unsets_what_it_does_not_name(bench: Bench, version: int) -> None:
    await bench.metadata.change_topic_tier_config(ORDERS, "orders", {LOCAL_MS: "5"})
    resource = AlterConfigsRequest.AlterConfigsResource
    configs = [resource.AlterableConfig(name=ENABLE, value="true"), resource.AlterableConfig(name=OTHER, value="1")]
    request = AlterConfigsRequest(
        resources=[resource(resource_type=2, resource_name="orders", configs=configs)], validate_only=False
    )
    answer = altered(AlterConfigsResponse, {})
    seen, response = await bench.pass_through(bench.alter, request, version, AlterConfigsResponse, answer)
    assert sent(seen) == {"orders": [OTHER]}
    assert codes_of(response) == {"orders": 0}
    assert bench.own() == {ENABLE: "true"}


@pytest.mark.parametrize("version", range(2, 8))
async def test_a_created_topic_is_given_its_settings(bench: Bench, version: int) -> None:
    topic = CreateTopicsRequest.CreatableTopic
    configs = {"new": {ENABLE: "true", OTHER: "1"}, "bad": {ENABLE: "true", "cleanup.policy": "compact"}}
    request = CreateTopicsRequest(
        topics=[
            topic(
                name=name,
                num_partitions=1,
                replication_factor=1,
                assignments=[],
                configs=[topic.CreatableTopicConfig(name=key, value=value) for key, value in wanted.items()],
            )
            for name, wanted in configs.items()
        ],
        timeout_ms=5,
        validate_only=False,
    )
    new_id = UUID(int=9)

    def answer(seen: Any) -> Any:
        assert {one.name: [c.name for c in one.configs] for one in seen.topics} == {
            "new": [OTHER],
            "bad": [UNKNOWN_KEY],
        }
        bench.cluster.topics["new"] = new_id
        one = CreateTopicsResponse.CreatableTopicResult
        shown = [
            one.CreatableTopicConfigs(name=ENABLE, value="false", read_only=False, config_source=5, is_sensitive=False),
            one.CreatableTopicConfigs(name=OTHER, value="1", read_only=False, config_source=1, is_sensitive=False),
        ]
        made = one(name="new", topic_id=new_id, error_code=0, error_message=None, topic_config_error_code=0,
                   num_partitions=1, replication_factor=1, configs=shown)  # fmt: skip
        refused = one(name="bad", topic_id=UUID(int=0), error_code=40, error_message="unknown",
                      topic_config_error_code=0, num_partitions=-1, replication_factor=-1, configs=None)  # fmt: skip
        return CreateTopicsResponse(throttle_time_ms=0, topics=[made, refused])

    _, response = await bench.pass_through(bench.alter, request, version, CreateTopicsResponse, answer)
    assert [one.error_code for one in response.topics] == [0, 40]
    assert "cleanup.policy" in response.topics[1].error_message
    assert bench.own(new_id) == {ENABLE: "true"}
    if version >= 5:
        assert [(c.name, c.value, c.config_source) for c in response.topics[0].configs] == [
            (ENABLE, "true", 1),
            (OTHER, "1", 1),
        ]


@pytest.mark.parametrize("version", range(1, 5))
@pytest.mark.parametrize("keys", [None, [], [ENABLE, LOCAL_MS, "local.retention.bytes"], [OTHER]])
async def test_settings_are_shown_as_they_hold(bench: Bench, version: int, keys: list[str] | None) -> None:
    await bench.metadata.change_topic_tier_config(RULED, "ruled", {LOCAL_MS: "5"})
    asked = DescribeConfigsRequest.DescribeConfigsResource
    request = DescribeConfigsRequest(
        resources=[asked(resource_type=2, resource_name="ruled", configuration_keys=keys)],
        include_synonyms=True,
        include_documentation=False,
    )

    def answer(seen: Any) -> Any:
        result = DescribeConfigsResponse.DescribeConfigsResult
        entry = result.DescribeConfigsResourceResult
        default = entry.DescribeConfigsSynonym(name="log.local.retention.ms", value="-2", source=5)
        broker = {LOCAL_MS: "-2", ENABLE: "false", OTHER: "1"}
        shown = [
            entry(name=name, value=value, read_only=False, config_source=5, is_sensitive=False,
                  synonyms=[default], config_type=5, documentation=None)
            for name, value in broker.items() if not keys or name in keys
        ]  # fmt: skip
        one = result(error_code=0, error_message=None, resource_type=2, resource_name="ruled", configs=shown)
        return DescribeConfigsResponse(throttle_time_ms=0, results=[one])

    _, response = await bench.pass_through(bench.describe, request, version, DescribeConfigsResponse, answer)
    shown = {entry.name: (entry.value, entry.config_source) for entry in response.results[0].configs}
    if keys == [OTHER]:
        assert shown == {OTHER: ("1", 5)}
        return
    assert shown[LOCAL_MS] == ("5", 1)
    assert shown[ENABLE] == ("true", 4)
    assert shown["local.retention.bytes"] == ("7", 4)
    assert ("remote.log.copy.disable" in shown) == (not keys)
    (local,) = [entry for entry in response.results[0].configs if entry.name == LOCAL_MS]
    assert [(one.name, one.value, one.source) for one in local.synonyms] == [
        (LOCAL_MS, "5", 1),
        ("log.local.retention.ms", "-2", 5),
    ]


async def test_the_metadata_topic_cannot_be_altered_whatever_the_broker_says(bench: Bench) -> None:
    request = incremental({METADATA_TOPIC: [("retention.ms", 0, "1")], "orders": [(OTHER, 0, "1")]})
    seen, response = await alter(bench, request)
    assert sent(seen) == {METADATA_TOPIC: [UNKNOWN_KEY], "orders": [OTHER]}
    assert codes_of(response) == {METADATA_TOPIC: 29, "orders": 0}


@pytest.mark.parametrize("version", range(2, 8))
async def test_the_metadata_topic_cannot_be_created(bench: Bench, version: int) -> None:
    """Not by a client, with settings that lose records, while it is missing."""
    topic = CreateTopicsRequest.CreatableTopic
    request = CreateTopicsRequest(
        topics=[
            topic(name=name, num_partitions=1, replication_factor=1, assignments=[], configs=[])
            for name in (METADATA_TOPIC, "new")
        ],
        timeout_ms=5,
        validate_only=False,
    )

    def answer(seen: Any) -> Any:
        assert [[config.name for config in one.configs] for one in seen.topics] == [[UNKNOWN_KEY], []]
        one = CreateTopicsResponse.CreatableTopicResult
        return CreateTopicsResponse(
            throttle_time_ms=0,
            topics=[
                one(name=name, topic_id=UUID(int=0), error_code=code, error_message=None, topic_config_error_code=0,
                    num_partitions=-1, replication_factor=-1, configs=None)
                for name, code in ((METADATA_TOPIC, 36), ("new", 0))
            ],
        )  # fmt: skip

    _, response = await bench.pass_through(bench.alter, request, version, CreateTopicsResponse, answer)
    assert [(one.name, one.error_code) for one in response.topics] == [(METADATA_TOPIC, 29), ("new", 0)]


async def test_a_change_that_another_one_made_impossible_is_refused(bench: Bench) -> None:
    """It was allowed when it was planned; the other one was recorded while the broker had it."""
    await bench.metadata.change_topic_tier_config(ORDERS, "orders", {ENABLE: "true"})

    def answer(seen: Any) -> Any:
        bench.metadata.tier_configs[TopicIdPartition(ORDERS, 0)] = {ENABLE: "true", "remote.log.copy.disable": "true"}
        return altered(IncrementalAlterConfigsResponse, {})(seen)

    request = incremental({"orders": [(LOCAL_MS, 0, "5")]})
    response_class = IncrementalAlterConfigsResponse
    _, response = await bench.pass_through(bench.alter, request, 1, response_class, answer)
    assert codes_of(response) == {"orders": 40}
    assert "remote.log.copy.disable" in response.responses[0].error_message
    assert LOCAL_MS not in bench.own()


async def test_a_client_that_goes_away_leaves_no_change_half_made(bench: Bench) -> None:
    recording, goes_on, recorded = asyncio.Event(), asyncio.Event(), asyncio.Event()
    change = bench.metadata.change_topic_tier_config

    async def slow(*args: Any) -> None:
        recording.set()
        await goes_on.wait()
        await change(*args)
        recorded.set()

    bench.metadata.change_topic_tier_config = slow  # type: ignore[method-assign,assignment]  # as a slow broker
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        client = group.create_task(alter(bench, incremental({"orders": [(ENABLE, 0, "true")]})))
        await recording.wait()
        client.cancel()
        await asyncio.wait([client])
        goes_on.set()
        await recorded.wait()
    assert bench.own() == {ENABLE: "true"}


@pytest.mark.parametrize("version", range(1, 7))
async def test_the_metadata_topic_cannot_be_deleted(bench: Bench, version: int) -> None:
    metadata_id = UUID(int=77)
    guard = MetadataTopicGuard(METADATA_TOPIC, {metadata_id: METADATA_TOPIC}.get)
    named = DeleteTopicsRequest.DeleteTopicState
    by_id = [named(name=None, topic_id=metadata_id), named(name="orders", topic_id=UUID(int=0))]
    names = {"topic_names": [METADATA_TOPIC, "orders"]} if version < 6 else {"topics": by_id}
    request = DeleteTopicsRequest(timeout_ms=5, **names)

    def answer(seen: Any) -> Any:
        asked = seen.topic_names if version < 6 else [one.name for one in seen.topics]
        assert METADATA_TOPIC not in asked
        one = DeleteTopicsResponse.DeletableTopicResult
        return DeleteTopicsResponse(
            throttle_time_ms=0,
            responses=[
                one(name=name, topic_id=UUID(int=0), error_code=0 if name == "orders" else 3, error_message=None)
                for name in reversed(asked)
            ],
        )

    _, response = await bench.pass_through(guard, request, version, DeleteTopicsResponse, answer)
    first, second = response.responses
    assert (first.name, first.error_code) == ("orders", 0)
    assert (second.name, second.error_code) == (METADATA_TOPIC if version < 6 else None, 29)
    if version >= 6:
        assert second.topic_id == metadata_id


@pytest.mark.parametrize("version", range(4))
async def test_the_metadata_topic_cannot_be_widened(bench: Bench, version: int) -> None:
    guard = MetadataTopicGuard(METADATA_TOPIC, bench.cluster.topic_name)
    topic = CreatePartitionsRequest.CreatePartitionsTopic
    request = CreatePartitionsRequest(
        topics=[topic(name=name, count=9, assignments=None) for name in (METADATA_TOPIC, "orders")],
        timeout_ms=5,
        validate_only=False,
    )

    def answer(seen: Any) -> Any:
        one = CreatePartitionsResponse.CreatePartitionsTopicResult
        results = [one(name=each.name, error_code=0, error_message=None) for each in seen.topics]
        assert METADATA_TOPIC not in [each.name for each in results]
        return CreatePartitionsResponse(throttle_time_ms=0, results=results)

    _, response = await bench.pass_through(guard, request, version, CreatePartitionsResponse, answer)
    assert [(one.name, one.error_code) for one in response.results] == [(METADATA_TOPIC, 29), ("orders", 0)]
