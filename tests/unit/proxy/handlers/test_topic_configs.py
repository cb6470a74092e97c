"""Tier settings through the proxy in every version: the broker's request, the record, and the client's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsResponse,
)

from proxy.handlers import alter_configs
from proxy.handlers.alter_configs import UNKNOWN_KEY
from tests.support.proxy.topic_configs_bench import (
    ENABLE,
    LOCAL_MS,
    ORDERS,
    OTHER,
    RULED,
    Bench,
    alter,
    altered,
    codes_of,
    incremental,
    legacy,
    sent,
)
from tiers.config.topic_policy import TopicConfig
from tiers.config.topic_settings import DELETE_ON_DISABLE, LOCAL_RETENTION_BYTES, TierValue
from tiers.errors import RemoteLogMetadataError
from tiers.model.ids import TopicIdPartition


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as group:
        yield Bench(group.create_task)


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
async def test_settings_that_the_broker_refuses_are_not_recorded(bench: Bench, code: int) -> None:
    seen, response = await alter(bench, incremental({"orders": [(ENABLE, 0, "true")]}), codes={"orders": code})
    assert sent(seen) == {"orders": [UNKNOWN_KEY]}
    assert codes_of(response) == {"orders": code}
    assert bench.own() == {}


@pytest.mark.parametrize("topic", ["orders", "missing"])
async def test_topics_are_looked_up_when_the_broker_has_allowed_the_client(
    bench: Bench, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy asks the brokers the same of a topic that exists and of one that does not, and nothing of its own."""

    def never(*_: object) -> None:
        raise AssertionError("the proxy used its own rights")

    monkeypatch.setattr(bench.configs, "_topic_ids", never)
    monkeypatch.setattr(bench.brokers, "of_topics", never)
    monkeypatch.setattr(bench.metadata.log, "ensure_fresh", never)
    request = incremental({topic: [(ENABLE, 0, "true"), (OTHER, 0, "1")]})
    seen, response = await alter(bench, request, codes={topic: 29})
    assert [(sent(asked), asked.validate_only) for asked in bench.asked_first] == [({topic: [OTHER]}, True)]
    assert (sent(seen), seen.validate_only) == ({topic: [UNKNOWN_KEY]}, False)
    assert codes_of(response) == {topic: 29}


async def test_a_broker_that_answers_a_topic_twice_ends_nothing(bench: Bench) -> None:
    def twice(seen: Any) -> Any:
        answer = altered(IncrementalAlterConfigsResponse, {})(seen)
        answer.responses = [*answer.responses, *answer.responses]
        return answer

    request = incremental({"orders": [(ENABLE, 0, "true")]})
    _, response = await bench.pass_through(bench.alter, request, 1, IncrementalAlterConfigsResponse, twice)
    assert [one.error_code for one in response.responses] == [0, 0]
    assert bench.own() == {ENABLE: "true"}


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


async def test_a_client_without_alter_learns_no_settings(bench: Bench) -> None:
    _, response = await alter(bench, incremental({"orders": [(LOCAL_MS, 0, "many")]}), codes={"orders": 29})
    assert codes_of(response) == {"orders": 29}
    assert response.responses[0].error_message is None


@pytest.mark.parametrize(
    ("change", "is_tiered"), [((ENABLE, 0, "true"), False), (("cleanup.policy", 0, "compact"), True)]
)
async def test_a_topic_that_brokers_learn_of_late_is_judged_by_its_settings(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: tuple[str, int, str], is_tiered: bool
) -> None:
    monkeypatch.setattr("proxy.handlers.topic_tier_configs._HEARD_WITHIN_MS", 60_000)
    if is_tiered:
        await bench.metadata.change_topic_tier_config(ORDERS, "orders", {ENABLE: "true"})
    else:
        bench.brokers.values["cleanup.policy"] = "compact"
    del bench.cluster.topics["orders"]
    bench.brokers.has_heard.clear()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        asked = group.create_task(alter(bench, incremental({"orders": [change]})))
        await asyncio.sleep(0)
        bench.cluster.topics["orders"] = ORDERS
        await bench.brokers.has_said_nothing.wait()
        assert not asked.done()
        bench.brokers.has_heard.set()
    assert codes_of(asked.result()[1]) == {"orders": 40}


async def test_a_topic_with_unknown_settings_is_not_judged_by_the_defaults(bench: Bench) -> None:
    bench.brokers.has_heard.clear()
    seen, response = await alter(bench, incremental({"orders": [(ENABLE, 0, "true")]}))
    assert sent(seen) == {"orders": [UNKNOWN_KEY]}
    assert codes_of(response) == {"orders": 7}
    assert bench.own() == {}


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


async def test_settings_that_are_not_recorded_in_time_are_retriable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alter_configs, "_RECORD_WITHIN_MS", 0)
    request = incremental({"orders": [(ENABLE, 0, "true")], "ruled": [(OTHER, 0, "6")]})
    assert codes_of((await alter(bench, request))[1]) == {"orders": 7, "ruled": 0}
    assert bench.own() == {}


async def test_configs_that_cannot_be_checked_or_recorded_are_retriable(bench: Bench) -> None:
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
    seen, response = await alter(bench, legacy("orders", {ENABLE: "true", OTHER: "1"}), version)
    assert sent(seen) == {"orders": [OTHER]}
    assert codes_of(response) == {"orders": 0}
    assert bench.own() == {ENABLE: "true"}


def creation(configs: Mapping[str, Mapping[str, str]]) -> Any:
    """A request for these topics, each with its settings."""
    topic = CreateTopicsRequest.CreatableTopic
    topics = [
        topic(
            name=name,
            num_partitions=1,
            replication_factor=1,
            assignments=[],
            configs=[topic.CreatableTopicConfig(name=key, value=value) for key, value in wanted.items()],
        )
        for name, wanted in configs.items()
    ]
    return CreateTopicsRequest(topics=topics, timeout_ms=5, validate_only=False)


async def test_settings_of_a_created_topic_go_to_no_deleted_topic(bench: Bench) -> None:
    """The topic of this name was deleted a moment ago, and one broker does not know that yet. Version 4 has no ids."""
    deleted_id, new_id = UUID(int=8), UUID(int=9)
    bench.cluster.lagging["new"] = deleted_id

    def answer(seen: Any) -> Any:
        if not seen.validate_only:
            bench.cluster.topics["new"] = new_id
        made = CreateTopicsResponse.CreatableTopicResult(name="new", error_code=0, error_message=None)
        return CreateTopicsResponse(throttle_time_ms=0, topics=[made])

    _, response = await bench.pass_through(
        bench.alter, creation({"new": {ENABLE: "true"}}), 4, CreateTopicsResponse, answer
    )
    assert [one.error_code for one in response.topics] == [0]
    assert bench.cluster.lagging == {}
    assert (bench.own(deleted_id), bench.own(new_id)) == ({}, {ENABLE: "true"})


@pytest.mark.parametrize("version", [2, 7])
async def test_a_created_topic_is_given_its_settings(bench: Bench, version: int) -> None:
    request = creation({"new": {ENABLE: "true", OTHER: "1"}, "bad": {ENABLE: "true", "cleanup.policy": "compact"}})
    new_id = UUID(int=9)

    def answer(seen: Any) -> Any:
        assert {one.name: [c.name for c in one.configs] for one in seen.topics} == {
            "new": [OTHER],
            "bad": ["cleanup.policy"] if seen.validate_only else [UNKNOWN_KEY],
        }
        if not seen.validate_only:
            bench.cluster.topics["new"] = new_id
        one = CreateTopicsResponse.CreatableTopicResult
        shown = [
            one.CreatableTopicConfigs(name=ENABLE, value="false", read_only=False, config_source=5, is_sensitive=False),
            one.CreatableTopicConfigs(name=OTHER, value="1", read_only=False, config_source=1, is_sensitive=False),
        ]
        made = one(name="new", topic_id=new_id, error_code=0, error_message=None, topic_config_error_code=0,
                   num_partitions=1, replication_factor=1, configs=shown)  # fmt: skip
        code = 0 if seen.validate_only else 40
        refused = one(name="bad", topic_id=UUID(int=0), error_code=code, error_message="unknown",
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


@pytest.mark.parametrize("version", [1, 4])
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
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        client = group.create_task(alter(bench, incremental({"orders": [(ENABLE, 0, "true")]})))
        await recording.wait()
        client.cancel()
        await asyncio.wait([client])
        goes_on.set()
        await recorded.wait()
    assert bench.own() == {ENABLE: "true"}


async def test_a_topic_that_is_disabled_by_an_unset_key_is_recorded_as_disabled(bench: Bench) -> None:
    """Without the record, the topic would look like one that is only missing in the settings file."""
    await bench.metadata.change_topic_tier_config(ORDERS, "orders", {ENABLE: "true"})
    changes = [(ENABLE, 1, None), (DELETE_ON_DISABLE, 0, "true")]
    assert codes_of((await alter(bench, incremental({"orders": changes})))[1]) == {"orders": 0}
    assert bench.own() == {ENABLE: "false", DELETE_ON_DISABLE: "true"}


async def test_the_look_ups_of_shown_topics_wait_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their timeouts do not add up. Otherwise a description of many topics takes hours while the metadata is behind."""
    all_wait = asyncio.Barrier(2)

    async def ensure_fresh(*_: object) -> None:
        await all_wait.wait()
        raise RemoteLogMetadataError("not now")

    monkeypatch.setattr(bench.metadata.log, "ensure_fresh", ensure_fresh)
    async with asyncio.timeout(60):
        assert await bench.configs.values(["orders", "ruled"], 1) == {}


async def test_the_settings_shown_follow_rules_that_change(bench: Bench) -> None:
    bench.rules = [TopicConfig(pattern="orders", local_retention_bytes=9)]
    shown = await bench.configs.values(["orders", "ruled"], None)
    assert [shown[topic][ENABLE].value for topic in ("orders", "ruled")] == ["true", "false"]
    assert shown["orders"][LOCAL_RETENTION_BYTES] == TierValue("9", is_from_file=True)


async def test_a_topic_that_is_named_twice_shows_its_settings_once(bench: Bench) -> None:
    """So a short request has no answer of many megabytes. Kafka's tools name a topic once."""
    asked = DescribeConfigsRequest.DescribeConfigsResource(resource_type=2, resource_name="orders")
    request = DescribeConfigsRequest(resources=[asked] * 2, include_synonyms=False, include_documentation=False)
    result = DescribeConfigsResponse.DescribeConfigsResult(resource_type=2, resource_name="orders", configs=[])
    answer = DescribeConfigsResponse(throttle_time_ms=0, results=[result] * 2)
    _, response = await bench.pass_through(bench.describe, request, 1, DescribeConfigsResponse, lambda seen: answer)
    assert [bool(one.configs) for one in response.results] == [True, False]
