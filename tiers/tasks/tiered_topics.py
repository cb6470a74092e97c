"""`TieredTopics` finds the tiered topics in the cluster's metadata and the topics' configuration.

* A broker that is cut off from its controllers answers an old retention. So two brokers are asked, and nothing expires
  in topics on which they disagree.
* Absence is no evidence: a topic that one answer lacks keeps its policy, until no broker knows the topic.
* The tier settings of a topic count while their metadata is fresh. Otherwise a topic that a user has switched off would
  be copied.
* The rules of the file may change at any time. The policies follow at once, by what the brokers said last.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from uuid import UUID

from kafka.protocol.admin import DescribeConfigsRequest

from protocol.errors import ErrorCode
from tiers.bounded_gather import bounded_gather, in_turns
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.config.topic_policy import (
    BROKER_KEYS,
    Refusal,
    TierWork,
    TopicConfig,
    TopicPolicy,
    managed_rule,
    policy_of,
    tiering_text,
)
from tiers.config.total_retention import UNLIMITED
from tiers.errors import BrokerError, RemoteLogMetadataError
from tiers.metadata.metadata_log import FreshMetadata
from tiers.model.ids import TopicIdPartition
from tiers.tasks.deletion.topic_deletion import ClusterTopicExistence
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.task_services import TIER_SETTINGS_MAX_AGE_MS

logger = logging.getLogger(__name__)
_TOPIC_RESOURCE = 2
_TOPICS_PER_REQUEST = 50
"""The answer for more topics would hold up the event loop while it is decoded."""
_TOPICS_OF_A_TURN = 200
_BROKERS_ASKED = 2
_SETTINGS_TIMEOUT_MS = 2_000
_SETTINGS_AT_ONCE = 16
_Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Known:
    """What a policy is made of, besides the rules: what was said last of a topic that a rule names.

    `config` has the broker's values of `BROKER_KEYS`. `is_doubtful`: the present retention may be another one."""

    topic: str
    topic_id: UUID
    partition_count: int
    config: Mapping[str, str]
    tier_settings: Mapping[str, str]
    is_doubtful: bool = False

    def policy(self, rule: TopicConfig) -> TopicPolicy | Refusal:
        found = policy_of(self.topic, self.topic_id, self.partition_count, rule, self.config, self.tier_settings)
        if self.is_doubtful and isinstance(found, TopicPolicy):
            # The present retention is unknown and may be higher: nothing expires, and no total retention is recorded.
            return replace(
                found, retention_ms=UNLIMITED, retention_bytes=UNLIMITED, total_to_record=None, is_doubtful=True
            )
        return found

    def is_named_by(self, rule: TopicConfig) -> bool:
        """Whether the settings mean this very topic. A pattern also matches compacted topics of Streams or Connect."""
        is_own = self.tier_settings.get("remote.storage.enable", "").lower() == "true"
        return rule.pattern == self.topic or is_own


class _Judged(NamedTuple):
    known: _Known
    rule: TopicConfig
    is_expected: bool
    found: TopicPolicy | Refusal


class TieredTopics:
    """Finds the tiered topics. `metadata` has the tier settings that were set for topics through a proxy; None: none
    were ever set, and nothing is known to be remote."""

    def __init__(
        self,
        client: BrokerClient,
        rules: Sequence[TopicConfig],
        metrics: RemoteLogManagerMetrics,
        metadata: FreshMetadata | None = None,
    ) -> None:
        self._client = client
        self._rules = tuple(rules)
        self._metrics = metrics
        self._metadata = metadata
        self._existence = ClusterTopicExistence(client)
        self._are_doubtful = False
        self._known: dict[UUID, _Known] = {}
        self._policies: dict[UUID, TopicPolicy] = {}
        self._refused: dict[str, str] = {}
        self._expected: set[str] = set()
        self._paused: set[tuple[str, TierWork]] = set()
        self.tiering = ""
        """Which topics are tiered, and by which rule, as of the last refresh. Empty before the first."""

    @property
    def policies(self) -> Mapping[UUID, TopicPolicy]:
        """The policies by topic id, as of the last refresh."""
        return self._policies

    @property
    def refused(self) -> Mapping[str, str]:
        """The reasons why topics that the settings tier cannot be tiered, by topic, as of the last refresh."""
        return self._refused

    def is_expected(self, topic: str) -> bool:
        """Whether the topic is expected to be tiered: the settings name this very topic, or it has remote records."""
        return topic in self._expected

    @property
    def rules(self) -> Sequence[TopicConfig]:
        """The rules of the file that are in effect."""
        return self._rules

    def change_rules(self, rules: Sequence[TopicConfig]) -> None:
        """Replaces the rules of the file. The policies follow before this returns."""
        self._rules = tuple(rules)
        judged = list(self._judgements(self._known.values(), self._rules))
        self._take(judged)
        self._report_tiering(judged)

    async def refresh(self, timeout_ms: int) -> Mapping[UUID, TopicPolicy]:
        """Asks the cluster, and returns the policies by topic id.

        If the configuration or the tier settings of a topic cannot be read, or an answer lacks the topic, it keeps its
        last policy, but nothing of it expires. Raises `BrokerError` when the cluster does not answer; the same then
        applies to every topic."""
        try:
            known, rules, judged = await self._read(timeout_ms), None, list[_Judged]()
            while rules is not self._rules:  # a reload may come between two turns
                rules = self._rules
                judged = [each async for each in in_turns(self._judgements(known, rules), _TOPICS_OF_A_TURN)]
            self._take(judged)
            self._report_tiering(judged)
        except Exception:
            self._take(self._judgements(map(_doubtful, self._known.values()), self._rules))
            raise
        return self._policies

    async def _read(self, timeout_ms: int) -> list[_Known]:
        """Asks the cluster about the topics that the rules name. What is not answered is as before, and doubtful."""
        metadata = await self._client.metadata(timeout_ms)
        topics = [topic for topic in metadata.topics.values() if not topic.is_internal]
        await self._read_settings(topics)
        unread, wanted = await self._without_answer(topics, timeout_ms), dict[str, tuple[TopicMetadata, _Settings]]()
        async for topic in in_turns(topics, _TOPICS_OF_A_TURN):
            if topic.error != ErrorCode.NONE or not self._is_read(topic.topic_id):
                unread.add(topic.topic_id)
                continue
            tier_settings = self._tier_settings(topic.topic_id)
            if managed_rule(topic.name, self._rules, tier_settings) is not None:
                wanted[topic.name] = topic, tier_settings
        configs, doubtful = await self._agreed(sorted(metadata.brokers), list(wanted), timeout_ms)
        unread |= {topic.topic_id for name, (topic, _) in wanted.items() if name not in configs}
        found = [
            _Known(name, topic.topic_id, len(topic.partitions), configs[name], tier_settings, name in doubtful)
            for name, (topic, tier_settings) in wanted.items()
            if name in configs
        ]
        return [*found, *(_doubtful(self._known[each]) for each in unread & self._known.keys())]

    def _take(self, judgements: Iterable[_Judged]) -> None:
        """Replaces the policies, and forgets the topics that the rules do not name."""
        judged = list(judgements)
        policies = {each.known.topic_id: each.found for each in judged if isinstance(each.found, TopicPolicy)}
        refused = {each.known.topic: each.found.reason for each in judged if isinstance(each.found, Refusal)}
        self._report(refused, {each.known.topic for each in judged if each.is_expected})
        self._report_paused(policies.values())
        self._known, self._policies = {each.known.topic_id: each.known for each in judged}, policies

    def _judgements(self, known: Iterable[_Known], rules: Sequence[TopicConfig]) -> Iterator[_Judged]:
        """Yields the topics that the rules name, with their policies."""
        for each in known:
            rule = managed_rule(each.topic, rules, each.tier_settings)
            if rule is not None:
                found = each.policy(rule)
                is_expected = each.is_named_by(rule) or (isinstance(found, Refusal) and self._has_remote_records(each))
                yield _Judged(each, rule, is_expected, found)

    def _has_remote_records(self, known: _Known) -> bool:
        metadata, topic_id = self._metadata, known.topic_id
        return (
            metadata is not None
            and metadata.state.is_tiered(topic_id)
            and any(
                metadata.state.earliest_offset(TopicIdPartition(topic_id, number, known.topic)) is not None
                for number in range(known.partition_count)
            )
        )

    async def _read_settings(self, topics: Sequence[TopicMetadata]) -> None:
        """Reads the tier settings that are not read to their end, as far as that succeeds in time."""
        metadata = self._metadata
        if metadata is None:
            return

        async def read(topic: TopicMetadata) -> None:
            with suppress(RemoteLogMetadataError):
                await metadata.ensure_fresh(
                    _of_settings(topic.topic_id), TIER_SETTINGS_MAX_AGE_MS, _SETTINGS_TIMEOUT_MS
                )

        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTINGS_TIMEOUT_MS / 1000):
                behind = [topic for topic in topics if not self._is_read(topic.topic_id)]
                await bounded_gather(behind, read, _SETTINGS_AT_ONCE)

    def _is_read(self, topic_id: UUID) -> bool:
        return self._metadata is None or self._metadata.is_fresh(_of_settings(topic_id), TIER_SETTINGS_MAX_AGE_MS)

    def _tier_settings(self, topic_id: UUID) -> Mapping[str, str]:
        return {} if self._metadata is None else self._metadata.state.topic_tier_config(topic_id)

    async def _without_answer(self, topics: Collection[TopicMetadata], timeout_ms: int) -> set[UUID]:
        """Returns the managed topics that the answer lacks, without those that no broker knows.

        If a broker does not answer, all of them may still exist."""
        missing = self._policies.keys() - {topic.topic_id for topic in topics}
        if not missing:
            return set()
        try:
            return missing - await self._existence.gone(missing, timeout_ms)
        except BrokerError:
            return set(missing)

    def _report(self, refused: dict[str, str], expected: Set[str]) -> None:
        for topic, reason in refused.items():
            if self._refused.get(topic) != reason or topic in expected - self._expected:
                level = logging.ERROR if topic in expected else logging.INFO
                logger.log(level, "a topic cannot be tiered", extra={"topic": topic, "reason": reason})
        self._refused, self._expected = refused, set(expected)
        self._metrics.refused_topics.set(len(refused.keys() & expected))

    def _report_tiering(self, judged: Sequence[_Judged]) -> None:
        tiered = [(each.known.topic, each.rule) for each in judged if isinstance(each.found, TopicPolicy)]
        text = tiering_text(self._rules, tiered)
        if text != self.tiering:
            logger.info("tiered: %s", text)
        self.tiering = text

    def _report_paused(self, policies: Iterable[TopicPolicy]) -> None:
        paused = {(policy.topic, work) for policy in policies for work in policy.paused}
        for topic, work in sorted(paused ^ self._paused):
            fields = {"topic": topic, "work": work.value}
            if (topic, work) in paused:
                logger.warning("an operator paused work on a topic", extra=fields)
            else:
                logger.warning("an operator resumed work on a topic", extra=fields)
        if paused != self._paused:
            self._metrics.paused.clear()
            for topic, work in paused:
                self._metrics.paused.labels(topic, work.value).set(1)
        self._paused = paused

    async def _agreed(
        self, brokers: list[int], topics: list[str], timeout_ms: int
    ) -> tuple[dict[str, dict[str, str]], set[str]]:
        """Returns the configurations, and the topics on which the asked brokers disagree."""
        chosen = random.sample(brokers, min(_BROKERS_ASKED, len(brokers)))
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
        """Returns the values of `BROKER_KEYS` by topic; None if the broker does not answer."""
        request, configs = DescribeConfigsRequest, dict[str, dict[str, str]]()
        for first in range(0, len(topics), _TOPICS_PER_REQUEST):
            resources = [
                request.DescribeConfigsResource(
                    resource_type=_TOPIC_RESOURCE, resource_name=topic, configuration_keys=list(BROKER_KEYS)
                )
                for topic in topics[first : first + _TOPICS_PER_REQUEST]
            ]
            message = request(resources=resources, include_synonyms=False, include_documentation=False)
            try:
                response: Any = await self._client.request(node_id, message, timeout_ms, min_version=1)
            except BrokerError as error:
                fields = {"node_id": node_id, "error": str(error)}
                logger.info("a broker does not answer how topics are configured", extra=fields)
                return None
            for result in response.results:
                if result.error_code == ErrorCode.NONE:
                    values = {entry.name: entry.value for entry in result.configs if entry.value is not None}
                    configs[result.resource_name] = values
        return configs


def _doubtful(known: _Known) -> _Known:
    return replace(known, is_doubtful=True)


def _of_settings(topic_id: UUID) -> TopicIdPartition:
    return TopicIdPartition(topic_id, 0)
