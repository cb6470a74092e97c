"""The first FindCoordinator makes a new cluster create its topic; until then there is no coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError
from tiers.metadata.topic.group.assignor import Assigned, Subscription, encode_assignment, encode_subscription
from tiers.metadata.topic.group.group_members import group_members
from tiers.metadata.topic.metadata_producer import GROUP_COORDINATOR, find_coordinator

FOUND = SimpleNamespace(error_code=ErrorCode.NONE, node_id=7)
NONE_YET = SimpleNamespace(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, node_id=-1)


class Cluster:
    """Answers in order, the last one again and again."""

    def __init__(self, *answers: SimpleNamespace) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def request(self, node_id: int | None, message: Any, timeout_ms: int, **versions: int) -> SimpleNamespace:
        assert timeout_ms > 0
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def client(cluster: Cluster) -> BrokerClient:
    return cast("BrokerClient", cluster)


async def test_a_new_cluster_is_asked_until_it_has_one() -> None:
    cluster = Cluster(NONE_YET, NONE_YET, FOUND)
    assert await find_coordinator(client(cluster), "group", GROUP_COORDINATOR, 30_000) == 7
    assert cluster.asked == 3


@pytest.mark.parametrize(
    ("answer", "timeout_ms"),
    [(NONE_YET, 50), (SimpleNamespace(error_code=ErrorCode.NOT_COORDINATOR, node_id=-1), 30_000)],
)
async def test_one_that_has_none_for_longer_is_an_error_that_may_pass(answer: SimpleNamespace, timeout_ms: int) -> None:
    cluster = Cluster(answer)
    with pytest.raises(BrokerError, match="no coordinator for group") as refused:
        await find_coordinator(client(cluster), "group", GROUP_COORDINATOR, timeout_ms)
    assert (refused.value.retriable, cluster.asked) == (True, 1)


def described(error_code: int, members: int = 0) -> SimpleNamespace:
    member = SimpleNamespace(
        member_id="tidegate-1",
        client_host="/10.0.0.7",
        member_metadata=encode_subscription("topic", Subscription(is_fit=False)),
        member_assignment=encode_assignment("topic", Assigned(frozenset({3, 5}), frozenset())),
    )
    return SimpleNamespace(groups=[SimpleNamespace(error_code=error_code, members=[member] * members)])


async def test_a_new_cluster_is_asked_until_its_coordinator_has_loaded() -> None:
    cluster = Cluster(
        FOUND, described(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), FOUND, described(ErrorCode.NONE, members=2)
    )
    assert len(await group_members(client(cluster), "topic", 30_000)) == 2
    assert cluster.asked == 4


async def test_a_member_tells_what_it_owns_and_whether_it_is_fit() -> None:
    [member] = await group_members(client(Cluster(FOUND, described(ErrorCode.NONE, members=1))), "topic", 30_000)
    assert (member.name, sorted(member.metadata_partitions)) == ("10.0.0.7 (tidegate-1)", [3, 5])
    assert not member.is_fit


async def test_a_group_without_describe_is_not_taken_for_empty() -> None:
    for answer, timeout_ms in ((ErrorCode.GROUP_AUTHORIZATION_FAILED, 30_000), (ErrorCode.NOT_COORDINATOR, 50)):
        cluster = Cluster(FOUND, described(answer), FOUND)
        with pytest.raises(BrokerError, match=r"group tidegate-topic (cannot be|was not) described"):
            await group_members(client(cluster), "topic", timeout_ms)
