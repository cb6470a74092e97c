"""`ConfiguredTopics` over a fake cluster. A test sets the topics' configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.cluster.configured_topics import ConfiguredTopics
from tests.support.fakes.broker.cluster import FakeCluster
from tests.support.fakes.remote_tier import RemoteTier
from tiers.broker.client import monotonic_ms
from tiers.config.topic_policy import TopicConfig
from tiers.errors import BrokerError

TIERABLE: Mapping[str, str] = {"cleanup.policy": "delete", "retention.ms": "1000", "retention.bytes": "-1"}


@dataclass
class FakeConfigs:
    """The configurations by topic. None: the proxy may not read it. A missing topic has `TIERABLE`."""

    configs: dict[str, Mapping[str, str] | None] = field(default_factory=dict)
    is_reachable: bool = True
    asked: list[str] = field(default_factory=list)

    async def of_policy(self, topic: str, timeout_ms: int) -> Mapping[str, str] | None:
        self.asked.append(topic)
        if not self.is_reachable:
            raise BrokerError("no answer", retriable=True)
        return self.configs.get(topic, TIERABLE)


def configured_topics(
    tier: RemoteTier, cluster: FakeCluster, *rules: TopicConfig, configs: FakeConfigs | None = None
) -> ConfiguredTopics:
    of_policy = (configs or FakeConfigs()).of_policy
    return ConfiguredTopics(lambda: rules, tier.rlmm.log, cluster, of_policy, monotonic_ms, 5_000)
