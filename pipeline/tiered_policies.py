"""`tiered_policies`: the policies of all tiered topics, from the brokers and the configuration file."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry

from tiers.access.open_tier import OpenTier
from tiers.config.topic_policy import TopicPolicy
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.tiered_topics import TieredTopics


async def tiered_policies(tier: OpenTier) -> Collection[TopicPolicy]:
    """Reads the current policies. Raises `BrokerError`."""
    rules = tier.config.topics
    metrics = RemoteLogManagerMetrics(CollectorRegistry())
    topics = TieredTopics(tier.client, rules, metrics, tier.metadata.topic_tier_config)
    return (await topics.refresh(tier.config.upstream.request_timeout_ms)).values()
