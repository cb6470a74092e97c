from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse
from prometheus_client import CollectorRegistry

from protocol.apis.metadata import PartitionMetadata
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.tiers.segment_metadata import copied, segment
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.config.topic_policy import Refusal, TierWork, TopicConfig, TopicPolicy, exclusion, policy_of
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.tiered_topics import TieredTopics

TIMEOUT_MS = 60_000
DELETE = {"cleanup.policy": "delete", "retention.ms": "604800000", "retention.bytes": "-1"}


class Cluster:
    """A broker with topics and their configuration."""

    def __init__(self, broker: ScriptedBroker, client: BrokerClient) -> None:
        self.broker = broker
        self.client = client
        self.configs: dict[str, dict[str, str]] = {}
        self.unreadable: set[str] = set()
        broker.answers[DescribeConfigsRequest.API_KEY] = self._describe

    def add(self, name: str, number: int, config: Mapping[str, str] = DELETE) -> UUID:
        topic_id = UUID(int=number)
        partitions = {0: PartitionMetadata(0, 1, 0)}
        self.broker.topics.append(TopicMetadata(name, topic_id, partitions, is_internal=name.startswith("__")))
        self.configs[name] = dict(config)
        return topic_id

    async def _describe(self, request: Any) -> Any:
        result = DescribeConfigsResponse.DescribeConfigsResult
        entry = result.DescribeConfigsResourceResult
        return DescribeConfigsResponse(
            throttle_time_ms=0,
            results=[
                result(
                    error_code=29 if resource.resource_name in self.unreadable else 0,
                    error_message=None,
                    resource_type=2,
                    resource_name=resource.resource_name,
                    configs=[
                        entry(name=key, value=value, synonyms=[])
                        for key, value in self.configs[resource.resource_name].items()
                        if key in resource.configuration_keys
                    ],
                )
                for resource in request.resources
            ],
        )


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with ScriptedBroker() as broker:
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        yield Cluster(broker, client)
        await client.close()


def tiered(
    cluster: Cluster,
    *patterns: str | TopicConfig,
    metadata: InMemoryRemoteLogMetadataManager | None = None,
    registry: CollectorRegistry | None = None,
) -> TieredTopics:
    rules = [each if isinstance(each, TopicConfig) else TopicConfig(pattern=each) for each in patterns]
    metrics = RemoteLogManagerMetrics(registry or CollectorRegistry())
    return TieredTopics(cluster.client, rules, metrics, (metadata or settings({})).log)


def doubtful(policy: TopicPolicy, **changes: Any) -> TopicPolicy:
    """Returns the policy while the present retention is not known: nothing expires."""
    return replace(policy, retention_ms=-1, retention_bytes=-1, is_doubtful=True, **changes)


@pytest.fixture
async def second(cluster: Cluster) -> AsyncIterator[Cluster]:
    """A second broker of the cluster, which says the same."""
    async with ScriptedBroker(2) as broker:
        other = Cluster(broker, cluster.client)
        broker.topics, other.configs = list(cluster.broker.topics), cluster.configs
        broker.brokers = cluster.broker.brokers = [cluster.broker, broker]
        yield other


def settings(own: Mapping[UUID, Mapping[str, str]]) -> InMemoryRemoteLogMetadataManager:
    """Metadata with the topics' own tier settings."""
    metadata = InMemoryRemoteLogMetadataManager(lambda: 0, lambda: 0)
    metadata.tier_configs = {TopicIdPartition(topic_id, 0): config for topic_id, config in own.items()}
    return metadata


async def test_the_first_rule_that_matches_decides_or_the_topic_itself(cluster: Cluster) -> None:
    for number, name in enumerate(("orders-eu", "orders-us", "clicks", "views"), 1):
        cluster.add(name, number)
    topics = tiered(
        cluster,
        TopicConfig(pattern="orders-us", remote_storage_enable=False),
        TopicConfig(pattern="orders-*", local_retention_ms=1000, segment_bytes=5),
        metadata=settings({UUID(int=4): {"remote.storage.enable": "true", "local.retention.bytes": "77"}}),
    )
    policies = await topics.refresh(TIMEOUT_MS)
    assert {policy.topic for policy in policies.values()} == {"orders-eu", "views"}
    assert policies[UUID(int=4)].local_retention_bytes == 77
    policy = policies[UUID(int=1)]
    assert (policy.retention_ms, policy.retention_bytes) == (604_800_000, -1)
    assert (policy.local_retention_ms, policy.local_retention_bytes, policy.segment_bytes) == (1000, None, 5)


async def test_what_is_paused_is_told_at_its_beginning_and_at_its_end(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    topic_id = cluster.add("orders", 1)
    metadata = settings({topic_id: {TierWork.TRIMMING.key: "true"}})
    registry = CollectorRegistry()
    topics = tiered(cluster, "orders", metadata=metadata, registry=registry)
    labels = {"topic": "orders", "work": "trimming"}
    for _ in range(2):
        assert (await topics.refresh(TIMEOUT_MS))[topic_id].paused == {TierWork.TRIMMING}
    assert registry.get_sample_value("tidegate_paused", labels) == 1
    metadata.tier_configs.clear()
    assert (await topics.refresh(TIMEOUT_MS))[topic_id].paused == frozenset()
    assert registry.get_sample_value("tidegate_paused", labels) is None
    said = [each.message for each in caplog.records if "an operator" in each.message]
    assert said == ["an operator paused work on a topic", "an operator resumed work on a topic"]


@pytest.mark.parametrize(
    ("topic", "own", "reason"),
    [
        ("off-1", {}, "the file excludes it: [[topics]] off-* has remote.storage.enable = false"),
        ("off-1", {"remote.storage.enable": "true"}, None),
        ("on-1", {}, None),
        ("on-1", {"remote.storage.enable": "false"}, "the topic's own remote.storage.enable is false"),
        ("other", {}, None),
        ("other", {"remote.storage.enable": "false"}, "the topic's own remote.storage.enable is false"),
        ("__on-internal", {}, None),
    ],
)
def test_an_excluded_topic_has_the_setting_that_excludes_it(
    topic: str, own: dict[str, str], reason: str | None
) -> None:
    rules = [TopicConfig(pattern="off-*", remote_storage_enable=False), TopicConfig(pattern="*on-*")]
    assert exclusion(topic, rules, own) == reason


@pytest.mark.parametrize(
    "unfit", [{"cleanup.policy": "compact"}, {"cleanup.policy": "compact,delete"}, {"remote.storage.enable": "true"}]
)
async def test_a_topic_that_cannot_be_tiered_is_refused_once_with_the_reason(
    cluster: Cluster, unfit: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("state", 1, DELETE | unfit)
    topics = tiered(cluster, "state")
    with caplog.at_level(logging.ERROR):
        assert await topics.refresh(TIMEOUT_MS) == {}
        assert await topics.refresh(TIMEOUT_MS) == {}
    assert [line.getMessage() for line in caplog.records] == ["a topic cannot be tiered"]


async def test_an_unfit_topic_is_an_error_if_it_is_meant_or_has_remote_records(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """One that only matches a pattern is none."""
    for number, name in enumerate(("state", "orders", "meant"), 1):
        cluster.add(name, number, DELETE | {"cleanup.policy": "compact"})
    metadata, registry = settings({UUID(int=3): {"remote.storage.enable": "true"}}), CollectorRegistry()
    await copied(metadata, segment(TopicIdPartition(UUID(int=2), 0, "orders"), 0, 9))
    topics = tiered(cluster, "*", metadata=metadata, registry=registry)
    with caplog.at_level(logging.INFO, "tiers.tasks.tiered_topics"):
        assert await topics.refresh(TIMEOUT_MS) == {}
    refused = [line for line in caplog.records if line.message == "a topic cannot be tiered"]
    assert {line.__dict__["topic"]: line.levelname for line in refused} == {
        "state": "INFO",
        "orders": "ERROR",
        "meant": "ERROR",
    }
    assert {name for name in topics.refused if topics.is_expected(name)} == {"orders", "meant"}
    assert registry.get_sample_value("tidegate_refused_topics") == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("local.retention.ms", "soon"),
        ("local.retention.bytes", "-3"),
        (RETENTION_MINUTES, "-2"),
        (RETENTION_BYTES, ""),
    ],
)
async def test_an_unreadable_tier_setting_refuses_its_topic_alone(cluster: Cluster, key: str, value: str) -> None:
    damaged, whole = cluster.add("orders", 1), cluster.add("clicks", 2)
    own = {damaged: {"remote.storage.enable": "true", key: value}}
    topics = tiered(cluster, "*", metadata=settings(own))
    policies = await topics.refresh(TIMEOUT_MS)
    assert policies.keys() == {whole}
    assert not policies[whole].is_doubtful
    assert topics.refused == {"orders": f"its tier setting {key} cannot be read: {value!r}"}
    assert topics.is_expected("orders")


async def test_an_unreadable_configuration_changes_and_expires_nothing(cluster: Cluster) -> None:
    topic_id = cluster.add("orders", 1)
    topics = tiered(cluster, "*")
    before = (await topics.refresh(TIMEOUT_MS))[topic_id]
    cluster.unreadable.add("orders")
    for _ in range(2):
        assert (await topics.refresh(TIMEOUT_MS))[topic_id] == doubtful(before)
    topics.change_rules([TopicConfig(pattern="orders", segment_bytes=5)])
    assert topics.policies == {topic_id: doubtful(before, segment_bytes=5)}
    topics.change_rules([TopicConfig(pattern="*")])
    cluster.unreadable.clear()
    assert (await topics.refresh(TIMEOUT_MS))[topic_id] == before


async def test_nothing_expires_by_what_a_second_broker_does_not_say_too(
    cluster: Cluster, second: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    topic_id, agreed = cluster.add("orders", 1), cluster.add("clicks", 2)
    second.broker.topics = cluster.broker.topics
    topics = tiered(cluster, "*")
    before = dict(await topics.refresh(TIMEOUT_MS))
    second.configs = {"orders": DELETE | {"retention.ms": "700000000"}, "clicks": DELETE}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            policies = await topics.refresh(TIMEOUT_MS)
            assert (policies[topic_id].retention_ms, policies[topic_id].retention_bytes) == (-1, -1)
            assert policies[agreed] == before[agreed]
    assert len(caplog.records) == 1
    second.configs["orders"] = dict(DELETE)
    assert await topics.refresh(TIMEOUT_MS) == before
    assert len(second.broker.received(DescribeConfigsRequest)) == 4


@pytest.mark.parametrize("silent", [{2}, {1, 2}])
async def test_nothing_expires_while_a_broker_does_not_answer(
    cluster: Cluster, second: Cluster, monkeypatch: pytest.MonkeyPatch, silent: set[int]
) -> None:
    topic_id = cluster.add("orders", 1)
    second.broker.topics = cluster.broker.topics
    topics = tiered(cluster, "*")
    before = (await topics.refresh(TIMEOUT_MS))[topic_id]
    request = cluster.client.request

    async def lossy(node_id: int | None, *arguments: Any, **options: Any) -> Any:
        if node_id in silent:
            raise BrokerError("no answer", retriable=True)
        return await request(node_id, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cluster.client, "request", lossy)
        if silent == {2}:
            await topics.refresh(TIMEOUT_MS)
        else:
            with pytest.raises(BrokerError):
                await topics.refresh(TIMEOUT_MS)
    assert topics.policies == {topic_id: doubtful(before)}
    assert (await topics.refresh(TIMEOUT_MS))[topic_id] == before


async def test_a_topic_that_one_answer_lacks_is_tiered_as_before(cluster: Cluster, second: Cluster) -> None:
    topic_id = cluster.add("orders", 1)
    second.broker.topics = list(cluster.broker.topics)
    topics = tiered(cluster, "*")
    cluster.broker.brokers = [cluster.broker]  # which is asked for the list of the topics
    before = (await topics.refresh(TIMEOUT_MS))[topic_id]
    cluster.broker.brokers = second.broker.brokers
    cluster.broker.topics.clear()
    assert await topics.refresh(TIMEOUT_MS) == {topic_id: doubtful(before)}
    second.broker.topics.clear()
    assert await topics.refresh(TIMEOUT_MS) == {}


async def test_tier_settings_that_are_not_read_change_and_expire_nothing(cluster: Cluster) -> None:
    switched_off, own, by_rule = cluster.add("orders", 1), cluster.add("clicks", 2), cluster.add("views", 3)
    metadata = settings(
        {switched_off: {"remote.storage.enable": "false"}, own: {"remote.storage.enable": "true"}},
    )
    topics = tiered(cluster, "orders", "views", metadata=metadata)
    metadata.fresh = False
    assert await topics.refresh(TIMEOUT_MS) == {}
    metadata.fresh = True
    before = dict(await topics.refresh(TIMEOUT_MS))
    assert before.keys() == {own, by_rule}
    metadata.fresh, metadata.tier_configs = False, {}
    assert await topics.refresh(TIMEOUT_MS) == {topic_id: doubtful(known) for topic_id, known in before.items()}


async def test_policies_follow_other_rules_at_once(cluster: Cluster) -> None:
    kept, dropped, added = cluster.add("orders", 1), cluster.add("clicks", 2), cluster.add("views", 3)
    topics = tiered(cluster, TopicConfig(pattern="orders", local_retention_ms=1), TopicConfig(pattern="clicks"))
    before = dict(await topics.refresh(TIMEOUT_MS))
    asked = len(cluster.broker.received(DescribeConfigsRequest))
    topics.change_rules([TopicConfig(pattern="orders", local_retention_ms=2), TopicConfig(pattern="views")])
    assert topics.policies == {kept: replace(before[kept], local_retention_ms=2)}
    assert len(cluster.broker.received(DescribeConfigsRequest)) == asked
    assert dropped in before
    assert (await topics.refresh(TIMEOUT_MS)).keys() == {kept, added}


async def test_rules_that_change_while_policies_are_made_count(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policies are made in slices, between which a reload may come."""
    kept, dropped = cluster.add("orders", 1), cluster.add("clicks", 2)
    topics = tiered(cluster, "*")
    before = dict(await topics.refresh(TIMEOUT_MS))
    monkeypatch.setattr("tiers.tasks.tiered_topics._TOPICS_OF_A_TURN", 1)
    is_first = True

    def interrupted(*arguments: Any) -> TopicPolicy | Refusal:
        nonlocal is_first
        if is_first:
            is_first = False
            topics.change_rules([TopicConfig(pattern="orders", local_retention_ms=7)])
        return policy_of(*arguments)

    monkeypatch.setattr("tiers.tasks.tiered_topics.policy_of", interrupted)
    assert await topics.refresh(TIMEOUT_MS) == {kept: replace(before[kept], local_retention_ms=7)}
    assert dropped in before


async def test_other_rules_change_the_refused_topics_at_once(cluster: Cluster) -> None:
    cluster.add("state", 1, DELETE | {"cleanup.policy": "compact"})
    topics = tiered(cluster, "s*")
    await topics.refresh(TIMEOUT_MS)
    for pattern, refused, is_expected in (("s*", {"state"}, False), ("state", {"state"}, True), ("x", set(), False)):
        topics.change_rules([TopicConfig(pattern=pattern)])
        assert (set(topics.refused), topics.is_expected("state")) == (refused, is_expected)


async def test_one_line_says_what_is_tiered_and_by_which_rule(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = settings({})
    for number, name in enumerate(("orders-eu", "orders-us", "payments"), 1):
        cluster.add(name, number)
    topics = tiered(cluster, metadata=metadata)
    with caplog.at_level(logging.INFO, "tiers.tasks.tiered_topics"):
        for _ in range(2):
            await topics.refresh(TIMEOUT_MS)
        await metadata.change_topic_tier_config(UUID(int=3), "payments", {"remote.storage.enable": "true"})
        await topics.refresh(TIMEOUT_MS)
        topics.change_rules([TopicConfig(pattern="orders-*"), TopicConfig(pattern="orderz")])
        await topics.refresh(TIMEOUT_MS)
    assert len(caplog.messages) == 4, "a line for each change"
    for said in ("[[topics]] orders-*: orders-eu, orders-us", "[[topics]] orderz: no topic", "kafka-configs: payments"):
        assert said in caplog.messages[-1]
