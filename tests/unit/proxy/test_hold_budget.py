"""Grants shrink while memory is scarce, never to nothing, and grow again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.hold_budget import OVERSHOOT_BYTES, HoldBudget


@given(st.lists(st.integers(-5, 1 << 26), max_size=30))
def test_everything_that_was_granted_comes_back(wanted: list[int]) -> None:
    budget = HoldBudget(1 << 26)
    grants = [budget.grant(size) for size in wanted]
    for size, granted in zip(wanted, grants, strict=True):
        assert 1 <= granted.max_bytes <= max(1, size)
    sizes = [granted.max_bytes for granted in grants]
    assert sum(sizes) <= (1 << 26) + len(grants)
    assert budget.reserved_bytes == sum(sizes) + OVERSHOOT_BYTES * len(grants)
    for granted in grants:
        granted.resize(granted.max_bytes // 2)
    assert budget.reserved_bytes == sum(size // 2 for size in sizes)
    for granted in [*grants, *grants]:
        granted.release()
    assert budget.reserved_bytes == 0


def test_an_answer_after_its_grant_was_released_reserves_nothing() -> None:
    budget = HoldBudget(1000)
    granted = budget.grant(100)
    granted.release()
    granted.resize(500)
    assert budget.reserved_bytes == 0


def test_one_request_cannot_take_it_all() -> None:
    budget = HoldBudget(1000)
    assert budget.grant(5000).max_bytes == 250
