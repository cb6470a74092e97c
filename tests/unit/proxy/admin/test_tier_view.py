"""`TierView` over a metadata manager, brokers and owners that a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

import pytest

from protocol.apis.metadata import PartitionMetadata
from proxy.admin import tier_look, tier_view
from proxy.admin.facts import TierBytes, TopicQuery, TopicSetting
from proxy.admin.tier_look import TierParts
from proxy.admin.tier_view import PARTITIONS_PER_PAGE, SEGMENTS_PER_PAGE, TierView
from proxy.cluster.broker_configs import BrokerValue
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.proxy.turn_counter import counted_turns
from tiers.broker.cluster_metadata import Broker, ClusterMetadata, TopicMetadata
from tiers.config.topic_policy import TierWork, TopicConfig, TopicPolicy
from tiers.errors import BrokerError, RemoteLogError
from tiers.explain.answers import PartitionAnswer
from tiers.explain.explain import Explanation
from tiers.explain.facts import LocalFacts, PartitionFacts
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogGap, OffsetAndEpoch
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.model.stored_segment import StoredSegment
from tiers.tasks.partition_tasks import PartitionReport, StageReport

ORDERS, AUDIT, GONE = UUID(int=1), UUID(int=2), UUID(int=3)
RULES = (TopicConfig(pattern="orders", local_retention_ms=21_600_000),)


def policy(topic: str, topic_id: UUID, partitions: int) -> TopicPolicy:
    return TopicPolicy(topic, topic_id, partitions, -1, -1, None, None, 1 << 20, 3_600_000)


@dataclass
class Stage:
    """Everything that the view looks at. A test changes the fields."""

    metadata: InMemoryRemoteLogMetadataManager = field(default_factory=InMemoryRemoteLogMetadataManager)
    policies: dict[UUID, TopicPolicy] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    rules: tuple[TopicConfig, ...] = RULES
    answers: dict[TopicIdPartition, LocalLogBounds | RemoteLogError] = field(default_factory=dict)
    reports: dict[TopicIdPartition, PartitionReport] = field(default_factory=dict)
    now_ms: int = 0
    asked_bounds: int = 0
    asked_configs: int = 0
    brokers_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.brokers_answer.set()
        self.policies[ORDERS] = policy("orders", ORDERS, 2)
        for number in range(3):
            self.copied(partition(ORDERS), number * 100, number * 100 + 100)
        self.metadata.local_log_starts[partition(ORDERS)] = OffsetAndEpoch(100, 4)
        self.answers[partition(ORDERS)] = LocalLogBounds(150, 400, 400, 4)
        self.answers[partition(ORDERS, 1)] = LocalLogBounds(0, 0, 0, 4)

    def copied(self, where: TopicIdPartition, start: int, end: int) -> None:
        segment_id = RemoteLogSegmentId(where, uuid4())
        self.metadata.segments[segment_id] = RemoteLogSegmentMetadata(
            segment_id, start, end - 1, 1, end, end, (LeaderEpochEntry(4, start),), 1000,
            RemoteLogSegmentState.COPY_SEGMENT_FINISHED,
        )  # fmt: skip
        self.metadata.begin_order[segment_id] = len(self.metadata.begin_order)

    async def bounds(self, where: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        self.asked_bounds += 1
        await self.brokers_answer.wait()
        answer = self.answers[where]
        if isinstance(answer, RemoteLogError):
            raise answer
        return answer

    def cached_metadata(self) -> ClusterMetadata:
        topics = [
            TopicMetadata(name, topic_id, {each: PartitionMetadata(each, 1, 4) for each in range(6)})
            for name, topic_id in (("orders", ORDERS), ("audit", AUDIT))
        ]
        return ClusterMetadata(
            "cluster", 1, {1: Broker(1, "kafka-1", 9092)}, {each.name: each for each in topics}, 0,
            {each.topic_id: each for each in topics},
        )  # fmt: skip

    async def of_topics(self, topics: Collection[str], timeout_ms: int) -> Mapping[str, Mapping[str, BrokerValue]]:
        self.asked_configs += 1
        said = {
            "retention.ms": BrokerValue("1000", "604800000"),
            "remote.storage.enable": BrokerValue("false", "false"),
        }
        return dict.fromkeys(topics, said)

    async def explained(self, where: TopicIdPartition, bounds: LocalLogBounds | None, trouble: str) -> PartitionAnswer:
        local = None if bounds is None else LocalFacts(bounds)
        known = self.policies.get(where.topic_id)
        return Explanation(
            PartitionFacts(RemoteLog(self.metadata.state, where), 1_000, known, local=local, local_trouble=trouble)
        ).partition()

    def parts(self) -> TierParts:
        return TierParts(
            cluster=self.cached_metadata,
            metadata=self.metadata.state,
            topics=self,
            bounds=self.bounds,
            configs=self.of_topics,
            rules=lambda: self.rules,
            report=self.reports.get,
            owns=lambda where: where.partition == 0,
            metadata_partition=lambda where: where.partition,
            explained=self.explained,
        )


def partition(topic_id: UUID, number: int = 0) -> TopicIdPartition:
    return TopicIdPartition(topic_id, number, {ORDERS: "orders", AUDIT: "audit", GONE: "gone"}[topic_id])


@asynccontextmanager
async def viewed(stage: Stage) -> AsyncIterator[TierView]:
    async with TierView(stage.parts(), clock_ms=lambda: stage.now_ms, wall_clock_ms=lambda: 1_000) as view:
        yield view


async def test_a_topic_has_its_bytes_by_tier_and_the_sources_of_its_settings() -> None:
    async with viewed(Stage()) as view:
        page = await view.topics(TopicQuery())
    (topic,) = page.topics
    assert (topic.topic, topic.state, topic.partitions) == ("orders", "tiered", 2)
    assert topic.bytes == page.bytes == TierBytes(1500, 1500, 1000)
    assert TopicSetting("local.retention.ms", "21600000", "file") in topic.settings
    assert TopicSetting("retention.ms", "1000", "topic") in topic.settings
    keys = [each.key for each in topic.settings]
    assert len(keys) == len(set(keys))


async def test_a_topic_without_a_policy_says_why() -> None:
    stage = Stage()
    stage.policies[ORDERS] = replace(stage.policies[ORDERS], copy_disable=True)
    stage.refused["audit"] = "cleanup.policy is 'compact'"
    stage.copied(partition(GONE), 0, 10)
    async with viewed(stage) as view:
        missing = await view.topics(TopicQuery())
        await stage.metadata.put_topic_deletion(GONE, "gone", is_confirmed=True)
        stage.now_ms += tier_view.FRESH_MS
        deleted = await view.topics(TopicQuery())
    said = {each.topic: (each.state, each.reason) for each in missing.topics}
    assert said == {
        "orders": ("paused", "remote.log.copy.disable is set"),
        "audit": ("refused", "cleanup.policy is 'compact'"),
        f"gone@{GONE}": ("missing", "no broker knows the topic"),
    }
    assert {each.topic: each.state for each in deleted.topics}[f"gone@{GONE}"] == "deleted"


async def test_a_pause_of_an_operator_is_named() -> None:
    stage = Stage()
    stage.policies[ORDERS] = replace(stage.policies[ORDERS], paused=frozenset({TierWork.TRIMMING, TierWork.COPYING}))
    async with viewed(stage) as view:
        (topic,) = (await view.topics(TopicQuery())).topics
    assert (topic.state, topic.reason) == (
        "paused",
        "an operator paused copying and trimming: "
        "`tidegate tier resume orders --copying --trimming --yes` ends the pause",
    )


async def test_a_leader_that_does_not_answer_leaves_its_partition_alone() -> None:
    stage = Stage()
    stage.answers[partition(ORDERS)] = BrokerError("connection refused")
    async with viewed(stage) as view:
        page = await view.topic("orders", 1)
        one = await view.partition("orders", 0, 0)
    assert page is not None
    assert one is not None
    assert one.notes == ("The leader does not answer: connection refused.",)
    assert page.topic.unanswered == 1
    assert [each.trouble for each in page.partitions] == ["connection refused", None]
    assert page.partitions[0].bytes == TierBytes(1000, 2000, 0)


async def test_a_partition_has_its_segments_gaps_and_the_owners_stages() -> None:
    stage = Stage()
    where = partition(ORDERS)
    stage.metadata.recorded_gaps[where] = {300: LogGap(300, 320)}
    stage.reports[where] = PartitionReport(5, 60, ("copy-stalled",), (StageReport("copy", 2, "refused", True),))
    async with viewed(stage) as view:
        page = await view.partition("orders", 0, 150)
    assert page is not None
    assert [(each.start_offset, each.is_on_broker) for each in page.segments] == [(100, True), (200, True)]
    assert [(each.start, each.end) for each in page.shape] == [(0, 100), (100, 200), (200, 300)]
    assert [(gap.first_offset, gap.next_offset) for gap in page.gaps] == [(300, 320)]
    assert [(each.name, each.failures, each.error) for each in page.stages] == [("copy", 2, "refused")]
    assert (page.line.alarms, page.line.backlog_bytes, page.line.is_owned) == (("copy-stalled",), 5, True)


async def test_a_partition_says_why_a_segment_is_where_it_is() -> None:
    async with viewed(Stage()) as view:
        page = await view.partition("orders", 0, 0)
    assert page is not None
    said = {(each.why.question.value, each.why.reason): (each.about, each.more) for each in page.whys}
    assert said["still on the broker", "no-local-retention"] == ("offsets 100 to 199", 1)
    assert said["not yet expired", "unlimited-retention"] == ("offsets 0 to 99", 2)
    assert ("not yet remote", "not-due") in said


async def test_what_the_tier_does_not_know_is_none() -> None:
    async with viewed(Stage()) as view:
        assert await view.topic("none", 1) is None
        assert await view.partition("orders", 7, 0) is None
        assert await view.partition("none", 0, 0) is None


async def test_segments_come_in_windows() -> None:
    stage = Stage()
    for number in range(3, 3 + SEGMENTS_PER_PAGE):
        stage.copied(partition(ORDERS), number * 100, number * 100 + 100)
    async with viewed(stage) as view:
        first = await view.partition("orders", 0, 0)
        assert first is not None
        assert first.next_from_offset is not None
        second = await view.partition("orders", 0, first.next_from_offset)
    assert second is not None
    assert (len(first.segments), len(second.segments)) == (SEGMENTS_PER_PAGE, 3)
    assert second.next_from_offset is None


async def test_partitions_come_in_pages() -> None:
    stage = Stage()
    stage.policies[ORDERS] = policy("orders", ORDERS, PARTITIONS_PER_PAGE + 1)
    stage.answers |= {partition(ORDERS, each): LocalLogBounds(0, 0, 0, 4) for each in range(2, PARTITIONS_PER_PAGE + 1)}
    async with viewed(stage) as view:
        page = await view.topic("orders", 2)
    assert page is not None
    assert [each.partition for each in page.partitions] == [PARTITIONS_PER_PAGE]


async def test_a_fresh_look_serves_all_callers() -> None:
    stage = Stage()
    async with viewed(stage) as view:
        assert stage.asked_bounds == 0
        await asyncio.gather(*(view.topics(TopicQuery()) for _ in range(10)))
        await view.topics(TopicQuery())
        assert (stage.asked_bounds, stage.asked_configs) == (2, 1)


async def test_a_walk_over_many_segments_lets_other_tasks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_look, "_SEGMENTS_PER_SLICE", 10)
    stage = Stage()
    for number in range(3, 100):
        stage.copied(partition(ORDERS), number * 100, number * 100 + 100)
    stored = stage.metadata.state.stored_segments
    async with counted_turns() as turns:

        def noted(where: TopicIdPartition, min_offset: int = 0) -> Iterator[StoredSegment]:
            for each in stored(where, min_offset):
                turns.note()
                yield each

        monkeypatch.setattr(stage.metadata.state, "stored_segments", noted)
        async with viewed(stage) as view:
            (topic,) = (await view.topics(TopicQuery())).topics
    assert (topic.segments, sum(turns.notes.values())) == (100, 100)
    assert max(turns.notes.values()) <= 10


async def test_the_settings_shown_follow_rules_that_change() -> None:
    stage = Stage()
    async with viewed(stage) as view:
        await view.topics(TopicQuery())
        stage.rules = (TopicConfig(pattern="orders", local_retention_ms=5),)
        found = await view.topic("orders", 1)
    assert found is not None
    assert TopicSetting("local.retention.ms", "5", "file") in found.topic.settings


async def test_an_old_look_is_shown_while_no_broker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_view, "WAIT_MS", 1)
    stage = Stage()
    stage.brokers_answer.clear()
    async with viewed(stage) as view:
        with pytest.raises(RemoteLogError, match="has not been looked at yet"):
            await view.look()
        stage.brokers_answer.set()
        while True:
            try:
                first = await view.look()
                break
            except RemoteLogError:
                continue
        stage.brokers_answer.clear()
        stage.now_ms += tier_view.FRESH_MS
        assert await view.look() is first
