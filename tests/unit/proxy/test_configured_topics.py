"""Which topics the configuration tiers: the same ones that an owner manages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from uuid import UUID

import pytest

from proxy.cluster.configured_topics import ConfiguredTopics
from tests.support.fakes.broker.cluster import FakeCluster
from tests.support.fakes.configured_topics import TIERABLE, FakeConfigs
from tests.support.fakes.remote_tier import RemoteTier
from tiers.config.topic_policy import TopicConfig
from tiers.errors import BrokerError, RemoteLogMetadataNotReadyError

ORDERS, OTHER, OWN = UUID(int=1), UUID(int=2), UUID(int=3)


class Rig:
    def __init__(self, tier: RemoteTier, *rules: TopicConfig) -> None:
        self.now_ms = 0
        self.tier, self.configs = tier, FakeConfigs()
        self.cluster = FakeCluster(topics={"orders": ORDERS, "other": OTHER, "__own": OWN})
        self.rules = rules
        self.topics = ConfiguredTopics(
            lambda: self.rules, tier.rlmm.log, self.cluster, self.configs.of_policy, lambda: self.now_ms, 5_000
        )

    async def tiered(self) -> list[bool]:
        return [await self.topics.is_tiered(each, 1000) for each in (ORDERS, OTHER, OWN)]


@pytest.fixture
def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(tmp_path)


async def test_the_first_rule_that_matches_decides(tier: RemoteTier) -> None:
    assert await Rig(tier).tiered() == [False, False, False]
    assert await Rig(tier, TopicConfig(pattern="or*")).tiered() == [True, False, False]
    but_other = TopicConfig(pattern="other", remote_storage_enable=False)
    assert await Rig(tier, but_other, TopicConfig(pattern="*")).tiered() == [True, False, False]


async def test_a_topics_own_settings_win_over_the_rules(tier: RemoteTier) -> None:
    rig = Rig(tier, TopicConfig(pattern="orders"))
    await tier.rlmm.change_topic_tier_config(OTHER, "other", {"remote.storage.enable": "true"})
    await tier.rlmm.change_topic_tier_config(ORDERS, "orders", {"remote.storage.enable": "false"})
    assert await rig.tiered() == [False, True, False]


@pytest.mark.parametrize(
    "config",
    [
        {**TIERABLE, "cleanup.policy": "compact"},
        {**TIERABLE, "remote.storage.enable": "true"},
        {"cleanup.policy": "delete"},
        None,
    ],
)
async def test_a_topic_that_no_owner_manages_is_not_waited_for(
    tier: RemoteTier, config: Mapping[str, str] | None
) -> None:
    """None: the brokers do not let the proxy see how the topic is configured."""
    rig = Rig(tier, TopicConfig(pattern="*"))
    rig.configs.configs["orders"] = config
    assert await rig.tiered() == [False, True, False]


async def test_a_topic_that_the_proxy_may_not_see_is_not_waited_for(tier: RemoteTier) -> None:
    rig = Rig(tier, TopicConfig(pattern="*"))
    assert not await rig.topics.is_tiered(UUID(int=9), 1000)
    assert rig.topics.may_be_tiered(UUID(int=9))


async def test_brokers_are_asked_once_in_a_while(tier: RemoteTier) -> None:
    rig = Rig(tier, TopicConfig(pattern="orders"))
    for _ in range(3):
        assert await rig.tiered() == [True, False, False]
    assert rig.configs.asked == ["orders"]
    rig.configs.configs["orders"] = {**TIERABLE, "cleanup.policy": "compact"}
    rig.now_ms += 10_000
    assert await rig.tiered() == [False, False, False]


async def test_without_an_answer_nothing_is_concluded(tier: RemoteTier) -> None:
    rig = Rig(tier, TopicConfig(pattern="orders"))
    rig.configs.is_reachable = False
    with pytest.raises(BrokerError):
        await rig.topics.is_tiered(ORDERS, 1000)
    rig.cluster.is_reachable = False
    with pytest.raises(BrokerError):
        await rig.topics.is_tiered(UUID(int=9), 1000)
    tier.rlmm.fresh = False
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await rig.topics.is_tiered(ORDERS, 1000)


async def test_the_answers_follow_rules_that_change(tier: RemoteTier) -> None:
    rig = Rig(tier, TopicConfig(pattern="orders"))
    assert await rig.tiered() == [True, False, False]
    rig.rules = (TopicConfig(pattern="other"),)
    assert await rig.tiered() == [False, True, False]
    assert (rig.topics.has_rule_for("orders"), rig.topics.has_rule_for("other")) == (False, True)
    assert (rig.topics.may_be_tiered(ORDERS), rig.topics.may_be_tiered(OTHER)) == (False, True)
