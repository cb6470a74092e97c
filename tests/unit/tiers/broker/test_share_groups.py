"""Share groups hold back a trim, or leave its limit unknown when brokers answer inconsistently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from uuid import UUID

import pytest

from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from tests.support.fakes.broker.describe_share_group_offsets import (
    GROUP_ID_NOT_FOUND,
    ShareGroup,
    with_group_error,
    with_partition_error,
)
from tests.support.fakes.broker.list_groups import failing
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tiers.broker.client import BrokerClient
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
    client: BrokerClient
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
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(ScriptedBroker(node_id)) for node_id in (1, 2)]
        for broker in brokers:
            broker.brokers, broker.topics = brokers, [offsets_topic(1, 2)]
        client = BrokerClient(brokers[0].addresses, client_id="test", request_timeout_ms=TIMEOUT_MS)
        stack.push_async_callback(client.close)
        yield Cluster(brokers, client, ClusterShareGroups(client))


async def test_no_share_group_holds_nothing_and_costs_no_second_question(cluster: Cluster) -> None:
    assert await cluster.lowest_start() is None
    assert cluster.describes() == 0


async def test_a_principal_to_whom_groups_may_be_hidden_trims_nothing(cluster: Cluster) -> None:
    """Without DESCRIBE on the cluster, a broker lists the groups that the principal may describe, and no others."""
    for broker in cluster.brokers:
        broker.cluster_operations -= {8}
    with pytest.raises(BrokerError, match="give DESCRIBE on the cluster"):
        await cluster.lowest_start()


async def test_brokers_without_share_groups_are_not_asked_for_the_right(cluster: Cluster) -> None:
    for broker in cluster.brokers:
        broker.cluster_operations = frozenset()
        broker.versions[ApiKey.LIST_GROUPS] = (0, 4)
    assert await cluster.lowest_start() is None


async def test_the_lowest_start_of_all_groups_at_all_coordinators(cluster: Cluster) -> None:
    first, second = cluster.brokers
    first.share_groups = [
        ShareGroup("a", starts={(OURS, 3): 70, (OURS, 2): 1, (OTHER, 3): 2}),
        ShareGroup("b", "Empty", {(OURS, 3): 50}),
    ]
    second.share_groups = [ShareGroup("c", starts={(OURS, 3): 60}), ShareGroup("d", starts={(OTHER, 3): 3})]
    assert await cluster.lowest_start() == 50
    assert cluster.describes() == 2, "one question for all groups of a coordinator"


async def test_members_without_a_start_offset_hold_everything(cluster: Cluster) -> None:
    cluster.brokers[0].share_groups = [ShareGroup("a", "Stable", {(OURS, 3): -1})]
    assert await cluster.lowest_start() == 0


async def test_a_group_that_never_acknowledged_and_has_no_members_holds_nothing(cluster: Cluster) -> None:
    cluster.brokers[0].share_groups = [ShareGroup("a", "Empty", {(OURS, 3): -1})]
    cluster.brokers[1].share_groups = [ShareGroup("b", "Stable", {(OURS, 3): 40})]
    assert await cluster.lowest_start() == 40


async def test_a_group_that_went_away_in_between(cluster: Cluster) -> None:
    cluster.brokers[0].share_groups = [ShareGroup("a", starts={(OURS, 3): 40})]
    cluster.brokers[0].script(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, with_group_error(GROUP_ID_NOT_FOUND))
    assert await cluster.lowest_start() is None


async def test_a_coordinator_that_does_not_list_leaves_it_unknown(cluster: Cluster) -> None:
    cluster.brokers[1].script(ApiKey.LIST_GROUPS, failing(COORDINATOR_LOAD_IN_PROGRESS))
    with pytest.raises(BrokerError, match="could not be listed") as failed:
        await cluster.lowest_start()
    assert failed.value.retriable
    assert await cluster.lowest_start() is None


async def test_a_group_that_tells_nothing_leaves_it_unknown(cluster: Cluster) -> None:
    cluster.brokers[0].share_groups = [ShareGroup("a", starts={(OURS, 3): 40})]
    cluster.brokers[0].script(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, with_group_error(UNKNOWN_SERVER_ERROR))
    with pytest.raises(BrokerError, match="share group a does not report its offsets"):
        await cluster.lowest_start()


async def test_a_partition_that_is_not_told_leaves_that_one_unknown(cluster: Cluster) -> None:
    cluster.brokers[0].share_groups = [ShareGroup("a", starts={(OURS, 3): 40, (OTHER, 3): 41})]
    cluster.brokers[1].share_groups = [ShareGroup("b", starts={(OURS, 3): 42})]
    cluster.brokers[0].script(
        ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, with_partition_error(UNKNOWN_SERVER_ERROR, OURS), times=2
    )
    with pytest.raises(BrokerError, match="share group a does not report its offset in a partition"):
        await cluster.lowest_start()
    assert await cluster.groups.lowest_start(TopicIdPartition(OTHER, 3, "other"), TIMEOUT_MS) == 41


async def test_groups_without_a_coordinator_leave_it_unknown(cluster: Cluster) -> None:
    for broker in cluster.brokers:
        broker.topics = [offsets_topic(1, -1)]
    with pytest.raises(BrokerError, match="without a coordinator"):
        await cluster.lowest_start()


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


async def test_a_broker_that_does_not_know_share_groups_has_none(cluster: Cluster) -> None:
    cluster.brokers[0].share_groups = [ShareGroup("a", starts={(OURS, 3): 40})]
    for broker in cluster.brokers:
        broker.versions[ApiKey.LIST_GROUPS] = (0, 4)
    assert await cluster.lowest_start() is None


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
