"""The cluster on the page: brokers that are gone, brokers that do not answer, and the owners."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from protocol.apis.metadata import PartitionMetadata
from proxy.admin import cluster_view
from proxy.admin.cluster_view import ClusterView, OwnersAlarms
from proxy.admin.facts import ClusterFacts, PartitionLine
from proxy.admin.lines import topic_line
from proxy.admin.tier_look import Look
from tiers.broker.cluster_metadata import Broker, ClusterMetadata, TopicMetadata
from tiers.errors import BrokerError
from tiers.metadata.metadata_log import MetadataStatus
from tiers.metadata.topic.group.group_members import OwnerMember


@dataclass
class Cluster:
    """Stands for the client, and counts how often the group was described."""

    named: set[int] = field(default_factory=lambda: {1, 2})
    answers: bool = True
    owned: frozenset[int] = frozenset({0, 1})
    now_ms: int = 0
    groups: int = 0

    @property
    def cached_metadata(self) -> ClusterMetadata:
        brokers = {each: Broker(each, f"kafka-{each}", 9092) for each in sorted(self.named)}
        topic = TopicMetadata(
            "orders", UUID(int=1), {each: PartitionMetadata(each, 1 + each % 2, 4) for each in range(3)}
        )
        return ClusterMetadata("cluster", 1, brokers, {"orders": topic}, 0, {topic.topic_id: topic})

    async def brokers(self, max_age_ms: int, timeout_ms: int) -> ClusterMetadata:
        if not self.answers:
            raise BrokerError("connection refused", retriable=True)
        return self.cached_metadata

    async def group_members(self, client: object, topic: str, timeout_ms: int) -> list[OwnerMember]:
        self.groups += 1
        return [
            OwnerMember("b", "10.0.0.2", frozenset({2}), is_fit=True),
            OwnerMember("a", "10.0.0.1", self.owned, is_fit=True),
        ]

    def status(self) -> MetadataStatus:
        return MetadataStatus(None, 5, self.owned)

    def view(self) -> ClusterView:
        return ClusterView(
            cast(Any, self),
            self.status,
            "__metadata",
            OwnersAlarms,
            clock_ms=lambda: self.now_ms,
            wall_clock_ms=lambda: 1_000_000 + self.now_ms,
        )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(cluster_view, "group_members", found.group_members)
    return found


def brokers(facts: ClusterFacts) -> dict[int, int | None]:
    return {each.node_id: each.gone_since_ms for each in facts.brokers}


async def test_a_broker_that_left_the_cluster_is_shown_as_gone(cluster: Cluster) -> None:
    view = cluster.view()
    assert brokers(await view.facts(None)) == {1: None, 2: None}
    cluster.now_ms += 60_000
    cluster.named.remove(2)
    assert brokers(await view.facts(None)) == {1: None, 2: 1_000_000}


async def test_a_cluster_that_does_not_answer_is_shown_as_it_was(cluster: Cluster) -> None:
    """Also if the page is opened first when no broker answers."""
    cluster.answers = False
    lines = [PartitionLine("orders", number) for number in range(3)]
    facts = await cluster.view().facts(Look(0, 0, {"orders": topic_line("orders", "1", "tiered", lines)}))
    assert facts.trouble == "connection refused"
    assert brokers(facts) == {1: None, 2: None}
    assert facts.waiting_for_brokers == 3, "nothing is copied"


async def test_a_broker_leads_the_partitions_that_the_metadata_says(cluster: Cluster) -> None:
    facts = await cluster.view().facts(None)
    assert {each.node_id: (each.leads, each.is_controller) for each in facts.brokers} == {1: (2, True), 2: (1, False)}


async def test_an_owner_has_the_partitions_of_its_metadata_partitions(cluster: Cluster) -> None:
    lines = [PartitionLine("orders", number, metadata_partition=number) for number in range(3)]
    look = Look(
        0, 0, {"orders": topic_line("orders", "1", "tiered", lines)}, {"orders": lines}, {"orders": UUID(int=1)}
    )
    facts = await cluster.view().facts(look)
    assert [(each.member, each.partitions, each.is_this) for each in facts.owners] == [("a", 2, True), ("b", 1, False)]
    assert (facts.topics, facts.partitions) == (1, 3)


async def test_paused_topics_are_named_and_counted(cluster: Cluster) -> None:
    names = [f"orders-{number:02d}" for number in range(cluster_view.MAX_PAUSED + 2)]
    topics = {each: topic_line(each, each, "paused", (), "an operator paused trimming") for each in names}
    topics["events"] = topic_line("events", "1", "tiered", ())
    facts = await cluster.view().facts(Look(0, 0, topics))
    assert facts.paused_topics == len(names)
    assert [each.topic for each in facts.paused] == names[: cluster_view.MAX_PAUSED]
    assert facts.paused[0].reason == "an operator paused trimming"
    assert facts.alarms == ()


async def test_the_group_is_described_at_most_every_15_seconds(cluster: Cluster) -> None:
    view = cluster.view()
    for _ in range(5):
        await view.facts(None)
    assert cluster.groups == 1
    cluster.now_ms += 15_000
    await view.facts(None)
    assert cluster.groups == 2


async def test_an_owner_whose_group_does_not_answer_knows_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> list[SimpleNamespace]:
        raise BrokerError("the coordinator is not available", retriable=True)

    monkeypatch.setattr(cluster_view, "group_members", refused)
    (owner,) = (await cluster.view().facts(None)).owners
    assert (owner.member, owner.metadata_partitions, owner.is_this) == ("", (0, 1), True)
