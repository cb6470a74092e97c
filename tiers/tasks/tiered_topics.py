"""`TieredTopics` finds the tiered topics in the cluster's metadata and the topics' configuration.

A broker that is cut off from its controllers keeps answering, with an old retention. So two brokers are asked, if there
are two, and nothing expires in topics on which they disagree.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any
from uuid import UUID

from kafka.protocol.admin import DescribeConfigsRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.config.topic_policy import BROKER_KEYS, Refusal, TopicConfig, TopicPolicy, managed_rule, policy_of
from tiers.config.total_retention import UNLIMITED, TotalRetention, recorded_total
from tiers.errors import BrokerError
from tiers.tasks.metrics import RemoteLogManagerMetrics

logger = logging.getLogger(__name__)
_TOPIC_RESOURCE = 2
_TOPICS_PER_REQUEST = 50
"""The answer for more topics would hold up the event loop while it is decoded."""
_TOPICS_PER_SLICE = 200
_WITNESSES = 2

Overrides = Callable[[UUID], Mapping[str, str] | None]


class TieredTopics:
    """Finds the tiered topics. `overrides` returns the tier settings that were set for a topic through the proxy."""

    def __init__(
        self,
        client: BrokerClient,
        rules: Sequence[TopicConfig],
        metrics: RemoteLogManagerMetrics,
        overrides: Overrides = lambda topic_id: None,
        *,
        choose: Callable[[Sequence[int], int], list[int]] = random.sample,
    ) -> None:
        self._client = client
        self._rules = tuple(rules)
        self._metrics = metrics
        self._overrides = overrides
        self._choose = choose
        self._are_doubtful = False
        self._policies: dict[UUID, TopicPolicy] = {}
        self._refused: dict[str, str] = {}

    @property
    def policies(self) -> Mapping[UUID, TopicPolicy]:
        """The policies by topic id, as of the last refresh."""
        return self._policies

    async def refresh(self, timeout_ms: int) -> Mapping[UUID, TopicPolicy]:
        """Asks the cluster, and returns the policies by topic id.

        If the configuration of a topic cannot be read, the topic keeps its last policy, but nothing of it expires.
        Raises `BrokerError` when the cluster does not answer; the same then applies to every topic."""
        wanted: dict[str, tuple[TopicMetadata, TopicConfig, TotalRetention]] = {}
        try:
            metadata = await self._client.metadata(0, timeout_ms)
            for number, topic in enumerate(metadata.topics.values(), 1):
                if not number % _TOPICS_PER_SLICE:
                    await asyncio.sleep(0)
                rule = self._rule(topic)
                if rule is not None:
                    recorded = recorded_total(self._overrides(topic.topic_id) or {})
                    wanted[topic.name] = topic, rule, recorded
            configs, doubtful = await self._agreed(sorted(metadata.brokers), list(wanted), timeout_ms)
        except Exception:
            self._policies = {topic_id: _not_expiring(known) for topic_id, known in self._policies.items()}
            raise
        policies: dict[UUID, TopicPolicy] = {}
        refused: dict[str, str] = {}
        for name, (topic, rule, recorded) in wanted.items():
            config = configs.get(name)
            if config is None:
                if topic.topic_id in self._policies:
                    policies[topic.topic_id] = _not_expiring(self._policies[topic.topic_id])
                continue
            found = policy_of(name, topic.topic_id, len(topic.partitions), rule, config, recorded)
            if isinstance(found, Refusal):
                refused[name] = found.reason
            else:
                policies[topic.topic_id] = _not_expiring(found) if name in doubtful else found
        self._report(refused, {name for name, (topic, rule, _) in wanted.items() if self._is_named(topic, rule)})
        self._policies = policies
        return policies

    def _rule(self, topic: TopicMetadata) -> TopicConfig | None:
        if topic.is_internal or topic.error != ErrorCode.NONE:
            return None
        return managed_rule(topic.name, self._rules, self._overrides(topic.topic_id))

    def _is_named(self, topic: TopicMetadata, rule: TopicConfig) -> bool:
        """Whether the settings mean this very topic. A pattern also matches compacted topics of Streams or Connect."""
        own = self._overrides(topic.topic_id) or {}
        return rule.pattern == topic.name or own.get("remote.storage.enable", "").lower() == "true"

    def _report(self, refused: dict[str, str], named: Set[str]) -> None:
        for topic, reason in refused.items():
            if self._refused.get(topic) != reason:
                level = logging.ERROR if topic in named else logging.INFO
                logger.log(level, "a topic cannot be tiered", extra={"topic": topic, "reason": reason})
        self._refused = refused
        self._metrics.refused_topics.set(len(refused.keys() & named))

    async def _agreed(
        self, brokers: list[int], topics: list[str], timeout_ms: int
    ) -> tuple[dict[str, dict[str, str]], set[str]]:
        """Returns the configurations, and the topics on which the asked brokers disagree."""
        chosen = self._choose(brokers, min(_WITNESSES, len(brokers)))
        async with asyncio.TaskGroup() as asking:
            asked = [asking.create_task(self._said_by(node_id, topics, timeout_ms)) for node_id in chosen]
        answers = [answer for one in asked if (answer := one.result()) is not None]
        if not answers:
            raise BrokerError("no broker answered how the topics are configured", retriable=True)
        configs = {topic: config for answer in answers for topic, config in answer.items()}
        is_whole = len(answers) == len(chosen)
        doubtful = {each for each in configs if not is_whole or any(one.get(each) != configs[each] for one in answers)}
        if doubtful and not self._are_doubtful:
            fields = {"brokers": chosen, "answers": len(answers), "topics": sorted(doubtful)[:10]}
            logger.warning("two brokers disagree on the configuration of topics: nothing of them expires", extra=fields)
        self._are_doubtful = bool(doubtful)
        return configs, doubtful

    async def _said_by(self, node_id: int, topics: list[str], timeout_ms: int) -> dict[str, dict[str, str]] | None:
        try:
            return await self._describe(node_id, topics, timeout_ms)
        except BrokerError as error:
            logger.info(
                "a broker does not answer how topics are configured", extra={"node_id": node_id, "error": str(error)}
            )
            return None

    async def _describe(self, node_id: int, topics: list[str], timeout_ms: int) -> dict[str, dict[str, str]]:
        request = DescribeConfigsRequest
        configs: dict[str, dict[str, str]] = {}
        for first in range(0, len(topics), _TOPICS_PER_REQUEST):
            resources = [
                request.DescribeConfigsResource(
                    resource_type=_TOPIC_RESOURCE, resource_name=topic, configuration_keys=list(BROKER_KEYS)
                )
                for topic in topics[first : first + _TOPICS_PER_REQUEST]
            ]
            message = request(resources=resources, include_synonyms=False, include_documentation=False)
            response: Any = await self._client.request(node_id, message, timeout_ms, min_version=1)
            for result in response.results:
                if result.error_code == ErrorCode.NONE:
                    configs[result.resource_name] = {
                        entry.name: entry.value for entry in result.configs if entry.value is not None
                    }
        return configs


def _not_expiring(known: TopicPolicy) -> TopicPolicy:
    """Returns the policy without retention. The present retention is unknown and may be higher, so nothing expires.

    For the same reason, no total retention is recorded."""
    return replace(known, retention_ms=UNLIMITED, retention_bytes=UNLIMITED, total_to_record=None)
