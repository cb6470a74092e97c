"""Percentiles, spreads and amounts over time, on values whose answers are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure.statistics import amount_between, percentile, spread

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.001, 1), (0.5, 50), (0.9, 90), (0.99, 99), (0.991, 100), (0.999, 100), (1.0, 100)]
)
def test_a_percentile_is_the_nearest_rank(share: float, expected: int) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], share) == expected


@given(values, st.floats(0.001, 1.0))
def test_at_least_the_share_does_not_exceed_a_percentile(found: list[float], share: float) -> None:
    limit = percentile(found, share)
    assert limit in found
    assert sum(each <= limit for each in found) >= share * len(found) - 1e-9
    assert sum(each < limit for each in found) < share * len(found) + 1e-9


def test_a_spread_has_the_median_and_both_ends() -> None:
    of_three = spread([5.0, 1.0, 2.0])
    assert (of_three.median, of_three.least, of_three.greatest, of_three.rounds) == (2.0, 1.0, 5.0, 3)


times = st.integers(0, 1000).map(lambda tenths: tenths / 10)


@given(st.lists(times, min_size=2, max_size=20, unique=True), st.lists(times, min_size=3, max_size=3))
def test_amounts_of_adjacent_spans_add_up(reports: list[float], bounds: list[float]) -> None:
    progress = [(at, float(number)) for number, at in enumerate(sorted(reports))]
    begin, middle, end = sorted(bounds)
    both = amount_between(progress, begin, middle) + amount_between(progress, middle, end)
    assert both == pytest.approx(amount_between(progress, begin, end))
