"""The group of the owners: who gets which metadata partitions, and what its members declare."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.errors import BrokerError, RemoteLogMetadataError
from tiers.metadata.records.serde import RecordType
from tiers.metadata.topic.group import membership
from tiers.metadata.topic.group.assignor import (
    Assigned,
    Subscription,
    assign,
    decode_assignment,
    decode_subscription,
    differing,
    encode_assignment,
    encode_assignments,
    encode_subscription,
)
from tiers.metadata.topic.group.group_members import group_members
from tiers.metadata.topic.group.membership import GroupMembership
from tiers.metadata.topic.metadata_producer import GROUP_COORDINATOR, find_coordinator
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.metadata.topic.settings import TopicBasedSettings

COUNT = 12
numbers = st.frozensets(st.integers(0, COUNT - 1))
record_types = st.frozensets(st.builds(RecordType, st.integers(0, 3000), st.integers(0, 9)))
subscriptions = st.builds(
    Subscription,
    owned=numbers,
    claims=st.none() | numbers,
    record_types=record_types,
    is_fit=st.booleans(),
    settings=st.text("ab= ", max_size=9),
)
groups = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), subscriptions, min_size=1, max_size=6)


@given(groups)
def test_every_partition_has_one_owner_and_shares_are_even(members: dict[str, Subscription]) -> None:
    assignment = assign(COUNT, members)
    given_away = [partition for partitions in assignment.values() for partition in partitions]
    assert len(given_away) == len(set(given_away))
    ordinary = [name for name, member in members.items() if member.claims is None]
    fit = [name for name in ordinary if members[name].is_fit]
    assert not fit or not any(assignment[name] for name in ordinary if name not in fit)
    ordinary = fit or ordinary
    claimed = frozenset[int]().union(*(member.claims or frozenset() for member in members.values()))
    assert set(given_away) == (set(range(COUNT)) if ordinary else claimed)
    shares = [len(assignment[name]) for name in ordinary]
    assert not shares or max(shares) - min(shares) <= 1
    for name, member in members.items():
        if member.claims is not None:
            assert set(assignment[name]) <= member.claims


@given(st.lists(st.text("abcdef", min_size=1, max_size=3), unique=True, min_size=1, max_size=5))
def test_partitions_stay_with_their_owners(names: list[str]) -> None:
    first = assign(COUNT, {name: Subscription() for name in names})
    owned = {name: Subscription(frozenset(partitions)) for name, partitions in first.items()}
    assert assign(COUNT, owned) == first
    joined = assign(COUNT, owned | {"newcomer": Subscription()})
    for name in names:
        assert set(joined[name]) <= set(first[name])


FIRST, SECOND = Subscription(frozenset({0, 1})), Subscription(frozenset({2, 3}))
SICK = Subscription(frozenset({0}), is_fit=False)


@pytest.mark.parametrize(
    ("members", "assigned"),
    [
        ({"a": FIRST, "b": SECOND}, {"a": [0, 1], "b": [2, 3]}),
        ({"a": FIRST, "b": SECOND, "job": Subscription(claims=frozenset({1, 2}))}, {"a": [0], "b": [3], "job": [1, 2]}),
        (
            {
                "a": Subscription(),
                "granted": Subscription(frozenset({1, 2}), claims=frozenset({1, 2})),
                "early": Subscription(claims=frozenset({2, 3})),
            },
            {"a": [0], "granted": [1, 2], "early": [3]},
        ),
        ({"a": SICK, "b": SECOND, "c": Subscription()}, {"a": [], "b": [2, 3], "c": [0, 1]}),
        ({"a": SICK, "job": Subscription(claims=frozenset({1}))}, {"a": [0, 2, 3], "job": [1]}),
        ({"a": SICK, "b": replace(SICK, owned=frozenset({3}))}, {"a": [0, 1], "b": [2, 3]}),
    ],
    ids=["shares", "a claim", "a granted claim stays", "a sick member", "a job takes no share", "all are sick"],
)
def test_claims_and_fitness_decide(members: dict[str, Subscription], assigned: dict[str, list[int]]) -> None:
    assert assign(4, members) == assigned


@given(subscriptions)
def test_a_subscription_survives_its_bytes(subscription: Subscription) -> None:
    whole = encode_subscription("topic", subscription)
    assert decode_subscription(whole) == decode_subscription(whole + b"later fields") == subscription
    for length in range(len(whole)):
        with pytest.raises(RemoteLogMetadataError):
            decode_subscription(whole[:length])


@given(numbers, record_types)
def test_an_assignment_survives_its_bytes(partitions: frozenset[int], types: frozenset[RecordType]) -> None:
    encoded = encode_assignment("topic", Assigned(partitions, types))
    assert decode_assignment(encoded, "topic") == (partitions, types)
    assert decode_assignment(encoded, "another") == (frozenset(), types)
    assert decode_assignment(b"", "topic") == (frozenset(), frozenset())
    for length in range(1, len(encoded)):
        with pytest.raises(RemoteLogMetadataError):
            decode_assignment(encoded[:length], "topic")


def test_every_assignment_says_what_all_members_read() -> None:
    types = [RecordType(1000, 1), RecordType(1006, 0), RecordType(1007, 0)]
    members = {
        "one": Subscription(record_types=frozenset(types)),
        "other": Subscription(record_types=frozenset([*types[1:], RecordType(1008, 0)])),
    }
    assigned = [decode_assignment(one, "topic") for one in encode_assignments("topic", COUNT, members).values()]
    assert [one.record_types for one in assigned] == [frozenset(types[1:])] * 2
    assert frozenset().union(*(one.metadata_partitions for one in assigned)) == frozenset(range(COUNT))
    members["old"] = Subscription()
    encoded = encode_assignments("topic", COUNT, members)
    assert decode_assignment(encoded["one"], "topic").record_types == frozenset()


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ("a=1 b=2", "a=1 b=2", ""),
        ("a=1 b=2", "a=1 b=3", "b"),
        ("a=1 b=2", "b=3 a=2", "a and b"),
        ("a=1", "", ""),
        ("", "a=1", ""),
    ],
)
def test_settings_that_differ_are_named(one: str, other: str, names: str) -> None:
    assert differing(one, other) == names


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

    @property
    def client(self) -> BrokerClient:
        return cast("BrokerClient", self)


async def test_a_new_cluster_is_asked_until_it_has_a_coordinator() -> None:
    """The first FindCoordinator makes it create its topic."""
    cluster = Cluster(NONE_YET, NONE_YET, FOUND)
    assert await find_coordinator(cluster.client, "group", GROUP_COORDINATOR, 30_000) == 7
    assert cluster.asked == 3
    not_this = SimpleNamespace(error_code=ErrorCode.NOT_COORDINATOR, node_id=-1)
    for answer, timeout_ms in ((NONE_YET, 50), (not_this, 30_000)):
        cluster = Cluster(answer)
        with pytest.raises(BrokerError, match="no coordinator for group") as refused:
            await find_coordinator(cluster.client, "group", GROUP_COORDINATOR, timeout_ms)
        assert (refused.value.retriable, cluster.asked) == (True, 1)


def described(error_code: int, *assigned: int) -> SimpleNamespace:
    member = SimpleNamespace(
        member_id="tidegate-1",
        client_host="/10.0.0.7",
        member_metadata=encode_subscription("topic", Subscription(is_fit=False)),
        member_assignment=encode_assignment("topic", Assigned(frozenset(assigned), frozenset())),
    )
    return SimpleNamespace(groups=[SimpleNamespace(error_code=error_code, members=[member])])


async def test_a_member_is_described_when_the_coordinator_has_loaded() -> None:
    loading, loaded = described(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), described(ErrorCode.NONE, 3, 5)
    cluster = Cluster(FOUND, loading, FOUND, loaded)
    [member] = await group_members(cluster.client, "topic", 30_000)
    assert (member.name, sorted(member.metadata_partitions)) == ("10.0.0.7 (tidegate-1)", [3, 5])
    assert (member.is_fit, cluster.asked) == (False, 4)


async def test_a_group_without_describe_is_not_taken_for_empty() -> None:
    for answer, timeout_ms in ((ErrorCode.GROUP_AUTHORIZATION_FAILED, 30_000), (ErrorCode.NOT_COORDINATOR, 50)):
        with pytest.raises(BrokerError, match=r"group tidegate-topic (cannot be|was not) described"):
            await group_members(Cluster(FOUND, described(answer), FOUND).client, "topic", timeout_ms)


class Coordinator:
    """Stands for the client. Accepts everything, and keeps the settings of each join."""

    def __init__(self) -> None:
        self.declared: list[str] = []

    async def request(self, node_id: int | None, message: Any, timeout_ms: int, **options: object) -> SimpleNamespace:
        if type(message).__name__ == "JoinGroupRequest":
            self.declared.append(decode_subscription(message.protocols[0].metadata).settings)
        assigned = encode_assignment("topic", Assigned(frozenset({0}), frozenset()))
        return SimpleNamespace(
            error_code=ErrorCode.NONE, node_id=1, member_id="a", leader="b", generation_id=1, assignment=assigned
        )


async def test_a_member_joins_again_when_its_settings_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_HEARTBEAT_INTERVAL_MS", 1)
    coordinator, settings = Coordinator(), {"now": "[[topics]]=1"}
    member = GroupMembership(
        cast(Any, coordinator),
        MetadataTopic("cluster", "topic", UUID(int=9), 1),
        TopicBasedSettings(Path(), declares=lambda: settings["now"]),
        clock_ms=monotonic_ms,
        on_assigned=lambda assignment: None,
        on_revoked=lambda: None,
    )
    running = asyncio.create_task(member.run())
    await until(lambda: member.is_confirmed(1_000))
    settings["now"] = "[[topics]]=2"
    await until(lambda: len(coordinator.declared) > 1)
    running.cancel()
    await asyncio.wait([running])
    assert coordinator.declared == ["[[topics]]=1", "[[topics]]=2"]
