"""Share groups hold back a trim, or leave its limit unknown when brokers answer inconsistently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from tests.support.fakes.broker.cluster_apis import (
    GROUP_ID_NOT_FOUND,
    ShareGroup,
    no_groups,
    with_group_error,
    with_partition_error,
)
from tests.support.fakes.broker.scripted_broker import ScriptedBroker, scripted_cluster
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.broker.share_groups import ClusterShareGroups, DescribeShareGroupOffsetsRequest
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

TIMEOUT_MS = 60_000
OURS, OTHER = UUID(int=1), UUID(int=2)
PARTITION = TopicIdPartition(OURS, 3, "topic")
COORDINATOR_LOAD_IN_PROGRESS = 14
UNKNOWN_SERVER_ERROR = -1


@dataclass
class Cluster:
    """Two brokers; groups of the first and of the second."""

    brokers: list[ScriptedBroker]
    groups: ClusterShareGroups

    async def lowest_start(self) -> int | None:
        return await self.groups.lowest_start(PARTITION, TIMEOUT_MS)

    def describes(self) -> int:
        return sum(len(broker.received(DescribeShareGroupOffsetsRequest)) for broker in self.brokers)


def offsets_topic(*leaders: int) -> TopicMetadata:
    partitions = {n: PartitionMetadata(n, leader, 1) for n, leader in enumerate(leaders)}
    return TopicMetadata("__consumer_offsets", UUID(int=9), partitions, is_internal=True)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with scripted_cluster() as (brokers, client):
        for broker in brokers:
            broker.topics = [offsets_topic(1, 2)]
        yield Cluster(brokers, ClusterShareGroups(client))


@pytest.mark.parametrize(
    ("first", "second", "lowest", "describes"),
    [
        ([], [], None, 0),
        (
            [
                ShareGroup("a", starts={(OURS, 3): 70, (OURS, 2): 1, (OTHER, 3): 2}),
                ShareGroup("b", "Empty", {(OURS, 3): 50}),
            ],
            [ShareGroup("c", starts={(OURS, 3): 60}), ShareGroup("d", starts={(OTHER, 3): 3})],
            50,
            2,
        ),
        ([ShareGroup("a", "Stable", {(OURS, 3): -1})], [], 0, 1),
        ([ShareGroup("a", "Empty", {(OURS, 3): -1})], [ShareGroup("b", "Stable", {(OURS, 3): 40})], 40, 2),
    ],
    ids=[
        "without a group, no second question",
        "all groups at all coordinators, with one question each",
        "members without a start offset hold everything",
        "a group that never acknowledged and has no members",
    ],
)
async def test_the_lowest_start_of_all_groups(
    cluster: Cluster, first: list[ShareGroup], second: list[ShareGroup], lowest: int | None, describes: int
) -> None:
    cluster.brokers[0].share_groups, cluster.brokers[1].share_groups = first, second
    assert (await cluster.lowest_start(), cluster.describes()) == (lowest, describes)


async def test_brokers_that_do_not_know_share_groups_have_none_and_need_no_right(cluster: Cluster) -> None:
    cluster.brokers[0].share_groups = [ShareGroup("a", starts={(OURS, 3): 40})]
    for broker in cluster.brokers:
        broker.cluster_operations = frozenset()
        broker.versions[ApiKey.LIST_GROUPS] = (0, 4)
    assert await cluster.lowest_start() is None


def hidden(cluster: Cluster) -> None:
    """Without DESCRIBE on the cluster, a broker lists the groups that the principal may describe, and no others."""
    for broker in cluster.brokers:
        broker.cluster_operations -= {8}


def unlisted(cluster: Cluster) -> None:
    cluster.brokers[1].script(ApiKey.LIST_GROUPS, no_groups(COORDINATOR_LOAD_IN_PROGRESS))


def without_coordinator(cluster: Cluster) -> None:
    for broker in cluster.brokers:
        broker.topics = [offsets_topic(1, -1)]


def described_as(answer: Any) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.brokers[0].script(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, answer, times=2)


@pytest.mark.parametrize(
    ("trouble", "said", "of_the_other"),
    [
        (hidden, "give DESCRIBE on the cluster", "give DESCRIBE on the cluster"),
        (unlisted, "could not be listed", 41),
        (without_coordinator, "without a coordinator", "without a coordinator"),
        (described_as(with_group_error(GROUP_ID_NOT_FOUND)), None, None),
        (described_as(with_group_error(UNKNOWN_SERVER_ERROR)), "a does not report its offsets", "a does not report"),
        (described_as(with_partition_error(UNKNOWN_SERVER_ERROR, OURS)), "a does not report its offset in a part", 41),
    ],
    ids=[
        "groups may be hidden",
        "an error for once",
        "no coordinator",
        "a group that went away",
        "a group",
        "one part",
    ],
)
async def test_a_group_that_may_be_missed_leaves_it_unknown(
    cluster: Cluster, trouble: Callable[[Cluster], None], said: str | None, of_the_other: int | str | None
) -> None:
    cluster.brokers[0].share_groups = [ShareGroup("a", starts={(OURS, 3): 40, (OTHER, 3): 41})]
    trouble(cluster)
    for partition, expected in ((PARTITION, said), (TopicIdPartition(OTHER, 3, "other"), of_the_other)):
        if isinstance(expected, str):
            with pytest.raises(BrokerError, match=expected) as failed:
                await cluster.groups.lowest_start(partition, TIMEOUT_MS)
            assert failed.value.retriable
        else:
            assert await cluster.groups.lowest_start(partition, TIMEOUT_MS) == expected


async def test_a_coordinator_that_came_back_a_moment_ago_is_asked(cluster: Cluster) -> None:
    first, second = cluster.brokers
    for broker in cluster.brokers:
        broker.brokers, broker.topics = [first], [offsets_topic(1, 1)]
    assert await cluster.lowest_start() is None
    for broker in cluster.brokers:
        broker.brokers, broker.topics = [first, second], [offsets_topic(1, 2)]
    second.share_groups = [ShareGroup("a", starts={(OURS, 3): 40})]
    assert await cluster.lowest_start() == 40


async def test_a_group_that_moves_to_an_asked_broker_leaves_it_unknown(cluster: Cluster) -> None:
    first, second = cluster.brokers
    second.share_groups = [ShareGroup("a", starts={(OURS, 3): 40})]
    listed = first.answers[ApiKey.LIST_GROUPS]

    async def listed_before_it_moves(request: object) -> object:
        answer = await listed(request)
        first.share_groups, second.share_groups = second.share_groups, []
        for broker in cluster.brokers:
            broker.topics = [offsets_topic(1, 1)]
        first.answers[ApiKey.LIST_GROUPS] = listed
        return answer

    first.answers[ApiKey.LIST_GROUPS] = listed_before_it_moves
    with pytest.raises(BrokerError, match="may have been missed") as failed:
        await cluster.lowest_start()
    assert failed.value.retriable
    assert await cluster.lowest_start() == 40


async def test_concurrent_questions_share_an_answer_that_is_younger_than_each(cluster: Cluster) -> None:
    first = cluster.brokers[0]
    first.share_groups = [ShareGroup("a", starts={(OURS, 3): 40})]
    is_asked, goes_on = asyncio.Event(), asyncio.Event()
    answer = first.answers[ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS]

    async def slowly(request: object) -> object:
        described = await answer(request)
        is_asked.set()
        await goes_on.wait()
        return described

    first.answers[ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS] = slowly
    async with asyncio.TaskGroup() as tasks:
        early = tasks.create_task(cluster.lowest_start())
        await is_asked.wait()
        first.share_groups = [ShareGroup("a", starts={(OURS, 3): 40}), ShareGroup("b", starts={(OURS, 3): 30})]
        late = [tasks.create_task(cluster.lowest_start()) for _ in range(50)]
        await asyncio.sleep(0)
        goes_on.set()
    assert early.result() == 40
    assert {task.result() for task in late} == {30}, "the group that came before they asked"
    assert cluster.describes() == 2
