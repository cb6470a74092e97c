from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.assignor import (
    Subscription,
    assign,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)

COUNT = 12
numbers = st.frozensets(st.integers(0, COUNT - 1))
subscriptions = st.builds(Subscription, owned=numbers, claims=st.none() | numbers)
groups = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), subscriptions, min_size=1, max_size=6)


@given(groups)
def test_every_partition_has_one_owner_and_shares_are_even(members: dict[str, Subscription]) -> None:
    assignment = assign(COUNT, members)
    given_away = [partition for partitions in assignment.values() for partition in partitions]
    assert len(given_away) == len(set(given_away))
    ordinary = [name for name, member in members.items() if member.claims is None]
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


@given(subscriptions)
def test_a_subscription_survives_its_bytes(subscription: Subscription) -> None:
    assert decode_subscription(encode_subscription("topic", subscription)) == subscription


@given(numbers)
def test_an_assignment_survives_its_bytes(partitions: frozenset[int]) -> None:
    encoded = encode_assignment("topic", sorted(partitions))
    assert decode_assignment(encoded, "topic") == partitions
    assert decode_assignment(encoded, "another") == frozenset()


def test_an_empty_assignment_is_no_bytes() -> None:
    assert decode_assignment(b"", "topic") == frozenset()


def test_torn_bytes_are_an_error() -> None:
    whole = encode_assignment("topic", [1, 2, 3])
    for length in range(1, len(whole) - 4):
        with pytest.raises(RemoteLogMetadataError):
            decode_assignment(whole[:length], "topic")


def test_a_claim_that_was_granted_stays_when_another_one_comes() -> None:
    claimed = Subscription(owned=frozenset({1, 2}), claims=frozenset({1, 2}))
    members = {"proxy": Subscription(), "b-first": claimed, "a-second": Subscription(claims=frozenset({2, 3}))}
    assert assign(4, members) == {"proxy": [0], "b-first": [1, 2], "a-second": [3]}
