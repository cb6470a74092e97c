from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.serde import RecordType
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


def test_a_claim_takes_partitions_while_it_lasts() -> None:
    usual = {"a": Subscription(frozenset({0, 1})), "b": Subscription(frozenset({2, 3}))}
    during = assign(4, usual | {"offload": Subscription(claims=frozenset({1, 2}))})
    assert during == {"a": [0], "b": [3], "offload": [1, 2]}


def test_a_sick_member_is_given_nothing_while_another_one_is_fit() -> None:
    members = {name: Subscription(frozenset({number})) for number, name in enumerate("abc")}
    sick = replace(members["a"], is_fit=False)
    assert assign(3, members | {"a": sick}) == {"a": [], "b": [0, 1], "c": [2]}
    offload = Subscription(claims=frozenset({1}))
    assert assign(2, {"a": sick, "offload": offload}) == {"a": [0], "offload": [1]}, "an offload takes no share"


def test_if_all_members_are_sick_all_keep_their_share() -> None:
    members = {name: Subscription(frozenset({number}), is_fit=False) for number, name in enumerate("abc")}
    assert assign(3, members) == {"a": [0], "b": [1], "c": [2]}


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


def test_a_claim_that_was_granted_stays_when_another_one_comes() -> None:
    claimed = Subscription(owned=frozenset({1, 2}), claims=frozenset({1, 2}))
    members = {"proxy": Subscription(), "b-first": claimed, "a-second": Subscription(claims=frozenset({2, 3}))}
    assert assign(4, members) == {"proxy": [0], "b-first": [1, 2], "a-second": [3]}


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
