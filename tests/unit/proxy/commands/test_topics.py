"""`tidegate tier topics` says what is wrong with a topic: a copy that does not end, a refusal, a pause."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

from proxy.commands.tier.topics import TieredTopic, state_text, tiered_topics
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CommandBench
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.config.topic_policy import TierWork, TopicConfig
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState

MINUTE_MS = 60_000


async def listed(bench: CommandBench) -> TieredTopic:
    """An existing topic whose settings no broker names."""

    async def no_configs(*args: Any, **options: Any) -> Any:
        return SimpleNamespace(results=[])

    known = SimpleNamespace(partitions={PARTITION.partition: None})
    tier = bench.tier()
    cluster = SimpleNamespace(topics={}, topics_by_id={PARTITION.topic_id: known})
    client = SimpleNamespace(request=no_configs)
    (line,) = await tiered_topics(replace(tier, cluster=cast(Any, cluster), client=cast(Any, client)))
    return line


async def begun(bench: CommandBench, segment: RemoteLogSegmentMetadata, ago_ms: int) -> int:
    """An attempt at `segment`'s range; returns when it was begun."""
    began_ms = time.time_ns() // 1_000_000 - ago_ms
    attempt = replace(
        segment,
        segment_id=RemoteLogSegmentId(PARTITION, uuid4()),
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    )
    bench.rlmm.wall_clock_ms = lambda: began_ms
    await bench.rlmm.add_remote_log_segment_metadata(attempt)
    return began_ms


async def test_attempts_that_were_left_are_shown_until_one_succeeds(bench: CommandBench) -> None:
    await bench.tiered(0)
    assert (await listed(bench)).copy_fails_since_ms is None
    following = await bench.stored(10)
    await begun(bench, following, ago_ms=MINUTE_MS // 2)
    assert (await listed(bench)).copy_fails_since_ms is None
    await begun(bench, following, ago_ms=2 * MINUTE_MS)
    oldest_ms = await begun(bench, following, ago_ms=20 * MINUTE_MS)
    assert (await listed(bench)).copy_fails_since_ms == oldest_ms
    await bench.tiered(10)
    assert (await listed(bench)).copy_fails_since_ms is None


class Brokers:
    """Brokers with the configuration of some topics."""

    def __init__(self, **configs: str) -> None:
        self._policies = configs

    async def request(self, node_id: Any, message: Any, *args: Any, **options: Any) -> Any:
        def described(topic: str) -> Any:
            settings = {"cleanup.policy": self._policies[topic], "retention.ms": "1000", "retention.bytes": "-1"}
            entries = [SimpleNamespace(name=k, value=v, config_source=5, synonyms=[]) for k, v in settings.items()]
            return SimpleNamespace(resource_name=topic, error_code=0, configs=entries)

        return SimpleNamespace(results=[described(each.resource_name) for each in message.resources])


async def states(bench: CommandBench, brokers: Brokers, *rules: TopicConfig) -> dict[str, str]:
    """The state of each topic that the brokers have. Their ids count from 1 on."""
    names = sorted(brokers._policies)
    topics = {name: TopicMetadata(name, UUID(int=number), {0: None}) for number, name in enumerate(names, 1)}  # type: ignore[dict-item]  # the partitions are only counted
    cluster = SimpleNamespace(topics=topics, topics_by_id={each.topic_id: each for each in topics.values()})
    tier = bench.tier()
    config = SimpleNamespace(topics=rules)
    found = await tiered_topics(
        replace(tier, cluster=cast(Any, cluster), client=cast(Any, brokers), config=cast(Any, config))
    )
    return {each.topic: state_text(each) for each in found}


async def test_a_topic_that_is_not_tiered_has_the_reason(bench: CommandBench) -> None:
    own = {"remote.storage.enable": "false"}
    bench.rlmm.tier_configs = {TopicIdPartition(UUID(int=4), 0, "d-off"): own}
    brokers = Brokers(**{"a-tiered": "delete", "b-compacted": "compact", "c-excluded": "delete", "d-off": "delete"})
    rules = [TopicConfig(pattern="c-*", remote_storage_enable=False), TopicConfig(pattern="*")]
    assert await states(bench, brokers, *rules) == {
        "a-tiered": "ok",
        "b-compacted": "not tiered: cleanup.policy is 'compact'; only 'delete' can be tiered",
        "c-excluded": "not tiered: the file excludes it: [[topics]] c-* has remote.storage.enable = false",
        "d-off": "not tiered: the topic's own remote.storage.enable is false",
    }


async def test_what_is_paused_is_listed(bench: CommandBench) -> None:
    brokers, rule = Brokers(orders="delete"), TopicConfig(pattern="*")
    assert await states(bench, brokers, TopicConfig(pattern="clicks")) == {}
    pause = {TierWork.TRIMMING.key: "true", TierWork.COPYING.key: "true"}
    await bench.rlmm.change_topic_tier_config(UUID(int=1), "orders", pause)
    assert await states(bench, brokers, rule) == {"orders": "paused: copying, trimming"}
    not_tiered = "not tiered: no setting tiers it; paused: copying, trimming"
    assert await states(bench, brokers, TopicConfig(pattern="clicks")) == {"orders": not_tiered}
