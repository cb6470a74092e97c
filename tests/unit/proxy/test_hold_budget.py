"""Slow readers hold memory for long. The grants of the others shrink slowly, never to nothing, and grow again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config import LimitsConfig
from proxy.wire.memory import FLOOR_BYTES, OVERSHOOT_BYTES, Grant, HoldBudget

MIB = 1024 * 1024
TOTAL_BYTES = LimitsConfig().max_decoded_bytes
WANTED_BYTES = 50 * MIB
"""The default of the Java consumer's fetch.max.bytes."""


def answered(budget: HoldBudget, connection_id: int, wanted_bytes: int = WANTED_BYTES) -> Grant:
    """Returns the grant of a connection whose answer is complete and as large as the grant allows."""
    grant = budget.grant(connection_id, wanted_bytes)
    grant.resize(grant.max_bytes)
    return grant


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-5, 1 << 26)), max_size=30))
def test_everything_that_was_granted_comes_back(wanted: list[tuple[int, int]]) -> None:
    budget = HoldBudget(1 << 26)
    grants = [budget.grant(connection_id, size) for connection_id, size in wanted]
    for (_, size), granted in zip(wanted, grants, strict=True):
        assert 0 <= granted.max_bytes <= max(1, min(size, budget.cap_bytes))
    sizes = [granted.max_bytes for granted in grants]
    assert budget.reserved_bytes == sum(size + OVERSHOOT_BYTES for size in sizes if size)
    for granted in grants:
        granted.resize(granted.max_bytes // 2)
    assert budget.reserved_bytes == sum(size // 2 for size in sizes)
    for granted in [*grants, *grants]:
        granted.release()
    assert budget.reserved_bytes == budget.holding_count == 0


def test_an_answer_after_its_grant_was_released_reserves_nothing() -> None:
    budget = HoldBudget(1000)
    granted = budget.grant(1, 100)
    granted.release()
    granted.resize(500)
    assert budget.reserved_bytes == 0


def test_one_connection_never_holds_more_than_its_cap() -> None:
    budget = HoldBudget(TOTAL_BYTES)
    sizes = [answered(budget, 1, MIB).max_bytes for _ in range(100)]
    assert sum(sizes) == budget.reserved_bytes == budget.cap_bytes == TOTAL_BYTES // 32
    assert sizes[-1] == 0
    assert budget.grant(2, WANTED_BYTES).max_bytes == budget.cap_bytes


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_consumer_beside_20_slow_readers_keeps_half_of_its_solo_rate(comes_back: bool) -> None:
    """The readers hold their answers for good, or each of them has come back for another answer many times."""
    budget = HoldBudget(TOTAL_BYTES)
    alone = answered(budget, 0)
    alone.release()
    slow = {connection_id: answered(budget, connection_id) for connection_id in range(1, 21)}
    beside = answered(budget, 0)
    beside.release()
    assert beside.max_bytes >= alone.max_bytes // 2
    if comes_back:
        for _ in range(50):
            for connection_id, grant in slow.items():
                grant.release()
                slow[connection_id] = answered(budget, connection_id)
                assert slow[connection_id].max_bytes >= alone.max_bytes // 2
        assert answered(budget, 0).max_bytes >= alone.max_bytes // 2


def test_readers_that_come_back_end_up_with_equal_grants() -> None:
    """The first readers hold their cap, and the last ones hold little. Every return evens that out."""
    budget, readers = HoldBudget(TOTAL_BYTES), 60
    slow = {connection_id: answered(budget, connection_id) for connection_id in range(readers)}
    assert min(grant.max_bytes for grant in slow.values()) == FLOOR_BYTES
    for _ in range(30):
        for connection_id, grant in slow.items():
            grant.release()
            slow[connection_id] = answered(budget, connection_id)
    sizes = [grant.max_bytes for grant in slow.values()]
    assert max(sizes) <= 1.1 * min(sizes)
    assert min(sizes) >= 0.8 * TOTAL_BYTES / readers


def test_without_free_memory_a_connection_gets_the_floor() -> None:
    budget = HoldBudget(1)
    assert [answered(budget, connection_id).max_bytes for connection_id in range(3)] == [FLOOR_BYTES] * 3
