"""`ConfiguredTopics` tells which topics this proxy's configuration tiers, whatever the metadata knows of them.

The metadata may not know a tiered partition: its metadata records may be lost, or the owner may not have written the
first one yet. If the configuration tiers a topic, missing metadata therefore proves nothing. The owner ends this state
in its first round, when it records that it saw the partition. `ConfiguredTopics` applies the same rule as the owner
(`TieredTopics`), so a client never waits for a topic that no owner manages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol
from uuid import UUID

from cachetools import LRUCache

from tiers.config.topic_policy import Rules, TopicConfig, TopicPolicy, managed_rule, policy_of, unreadable_setting
from tiers.errors import NotKnownNow
from tiers.metadata.metadata_log import FreshMetadata
from tiers.model.ids import TopicIdPartition

_KEPT_FOR_MS = 10_000
_MAX_TOPICS = 10_000


class TopicNames(Protocol):
    """The methods of `TopicDirectory` that `ConfiguredTopics` needs."""

    def topic_name(self, topic_id: UUID) -> str | None: ...

    async def resolve_topic_name(self, topic_id: UUID, timeout_ms: int) -> str | None: ...


class ConfiguredTopics:
    def __init__(
        self,
        rules: Rules,
        metadata: FreshMetadata,
        topics: TopicNames,
        of_policy: Callable[[str, int], Awaitable[Mapping[str, str] | None]],
        clock_ms: Callable[[], int],
        max_age_ms: int,
    ) -> None:
        """`of_policy` is `BrokerConfigs.of_policy`.

        `max_age_ms` is the greatest age of the topics' names and of their tier settings."""
        self._rules = rules
        self._metadata = metadata
        self._topics = topics
        self._of_policy = of_policy
        self._clock_ms = clock_ms
        self._max_age_ms = max_age_ms
        self._answers: LRUCache[UUID, tuple[int, TopicConfig, bool]] = LRUCache(_MAX_TOPICS)

    def may_be_tiered(self, topic_id: UUID) -> bool:
        """Whether `is_tiered` may return True. Does not wait. True too while the topic's name is unknown here."""
        name = self._topics.topic_name(topic_id)
        return name is None or self._rule(topic_id, name) is not None

    def has_rule_for(self, name: str) -> bool:
        """Whether the configuration file tiers topics of this name. The topic may be unknown here, or not exist."""
        return managed_rule(name, self._rules(), None) is not None

    async def is_tiered(self, topic_id: UUID, timeout_ms: int) -> bool:
        """Whether an owner with this configuration manages the topic. Raises `RemoteLogError` when that is unknown.

        Asks the brokers for the topic's own configuration at most every ten seconds."""
        name = self._topics.topic_name(topic_id)
        if name is None:
            name = await self._topics.resolve_topic_name(topic_id, timeout_ms)
        if name is None:
            return False  # this proxy may not see the topic, so an owner with the same rights may not see it either
        # The freshness of the topic's partition 0 is the freshness of the topic's tier settings.
        await self._metadata.ensure_fresh(TopicIdPartition(topic_id, 0, name), self._max_age_ms, timeout_ms)
        rule = self._rule(topic_id, name)
        if rule is None:
            return False
        now_ms = self._clock_ms()
        known = self._answers.get(topic_id)
        if known is not None and known[1] == rule and now_ms - known[0] < _KEPT_FOR_MS:
            return known[2]
        config = await self._of_policy(name, timeout_ms)
        is_managed = config is not None and isinstance(policy_of(name, topic_id, 1, rule, config), TopicPolicy)
        self._answers[topic_id] = now_ms, rule, is_managed
        return is_managed

    def _rule(self, topic_id: UUID, name: str) -> TopicConfig | None:
        own = self._metadata.state.topic_tier_config(topic_id)
        if (unreadable := unreadable_setting(own)) is not None:
            raise NotKnownNow(f"{name}: {unreadable}")
        return managed_rule(name, self._rules(), own)


class NothingConfigured:
    """Replaces `ConfiguredTopics` where no configuration tiers a topic."""

    def may_be_tiered(self, topic_id: UUID) -> bool:
        return False

    def has_rule_for(self, name: str) -> bool:
        return False

    async def is_tiered(self, topic_id: UUID, timeout_ms: int) -> bool:
        return False
