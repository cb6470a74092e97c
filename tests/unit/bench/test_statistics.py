"""Percentiles, spreads and amounts over time, on values whose answers are known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure.statistics import amount_between, by_slice, percentile, spread, spread_begin

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.001, 1), (0.5, 50), (0.9, 90), (0.99, 99), (0.991, 100), (0.999, 100), (1.0, 100)]
)
def test_a_percentile_is_the_nearest_rank(share: float, expected: int) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], share) == expected


def test_a_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 0.5))


@given(values, st.floats(0.001, 1.0))
def test_at_least_the_share_does_not_exceed_a_percentile(found: list[float], share: float) -> None:
    limit = percentile(found, share)
    assert limit in found
    assert sum(each <= limit for each in found) >= share * len(found) - 1e-9
    assert sum(each < limit for each in found) < share * len(found) + 1e-9


def test_a_spread_has_the_median_and_both_ends() -> None:
    of_three = spread([5.0, 1.0, 2.0])
    assert (of_three.median, of_three.least, of_three.greatest, of_three.rounds) == (2.0, 1.0, 5.0, 3)


def test_a_spread_leaves_out_rounds_without_a_figure() -> None:
    assert spread([math.nan, 4.0]).rounds == 1
    assert math.isnan(spread([]).median)


def test_samples_fall_into_slices_of_time() -> None:
    assert by_slice([(0.0, 1.0), (0.49, 2.0), (1.2, 4.0), (0.5, 3.0)], 0.5) == {0: [1.0, 2.0], 1: [3.0], 2: [4.0]}


def test_an_amount_grows_on_a_straight_line_between_reports() -> None:
    progress = [(10.0, 0.0), (20.0, 100.0), (30.0, 100.0)]
    assert amount_between(progress, 12.0, 17.0) == pytest.approx(50.0)
    assert amount_between(progress, 18.0, 25.0) == pytest.approx(20.0)
    assert amount_between(progress, 25.0, 99.0) == 0.0
    assert amount_between([], 0.0, 99.0) == 0.0


times = st.integers(0, 1000).map(lambda tenths: tenths / 10)


@given(st.lists(times, min_size=2, max_size=20, unique=True), st.lists(times, min_size=3, max_size=3))
def test_amounts_of_adjacent_spans_add_up(reports: list[float], bounds: list[float]) -> None:
    progress = [(at, float(number)) for number, at in enumerate(sorted(reports))]
    begin, middle, end = sorted(bounds)
    both = amount_between(progress, begin, middle) + amount_between(progress, middle, end)
    assert both == pytest.approx(amount_between(progress, begin, end))


def test_readers_begin_far_from_each_other() -> None:
    assert [spread_begin(index) for index in range(6)] == [0.0, 0.5, 0.25, 0.75, 0.125, 0.625]
    assert sorted(spread_begin(index) for index in range(16)) == [index / 16 for index in range(16)]
