"""Positions, ticks and numbers of the pictures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.svg import Linear, Logarithmic, element, log_range, path, shown, text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (0.4234, "0.42"),
        (3.1, "3.1"),
        (4.0, "4"),
        (12.53, "12.5"),
        (40.0, "40"),
        (148.4, "148"),
        (12_500.0, "12,500"),
        (math.nan, "-"),
    ],
)
def test_numbers_have_about_three_digits(value: float, expected: str) -> None:
    assert shown(value) == expected


def test_a_linear_scale_maps_ends_to_ends() -> None:
    scale = Linear(0.0, 50.0, 100.0, 200.0)
    assert [scale(value) for value in (0, 25, 50, 99)] == [100, 150, 200, 200]


def test_ticks_are_round() -> None:
    assert Linear(0.0, 223.0, 0.0, 1.0).ticks(4) == [0, 100, 200]
    assert Linear(0.0, 0.9, 0.0, 1.0).ticks(3) == pytest.approx([0, 0.5])


@given(st.floats(1e-3, 1e6), st.integers(1, 10))
def test_ticks_lie_within_the_range(high: float, count: int) -> None:
    ticks = Linear(0.0, high, 0.0, 1.0).ticks(count)
    assert 1 <= len(ticks) <= count + 1
    assert all(0 <= tick <= high * (1 + 1e-6) for tick in ticks)


def test_a_logarithmic_scale_gives_each_decade_the_same_length() -> None:
    scale = Logarithmic(1.0, 1000.0, 300.0, 0.0)
    assert [scale(value) for value in (1, 10, 100, 1000, 5000)] == pytest.approx([300, 200, 100, 0, 0])
    assert scale.ticks() == [1, 10, 100, 1000]


@given(st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=50))
def test_a_logarithmic_range_has_all_values_and_a_decade(values: list[float]) -> None:
    low, high = log_range(values)
    assert low <= min(values) * (1 + 1e-6)
    assert high >= max(values) * (1 - 1e-6)
    assert high >= 10 * low * (1 - 1e-6)


def test_a_point_that_is_no_number_interrupts_a_line() -> None:
    drawn = path([(0, 1), (1, 2), (2, math.nan), (3, 4), (5, 6)], "stroke")
    assert 'd="M0.0 1.0 L1.0 2.0 M3.0 4.0 L5.0 6.0"' in drawn


def test_markup_in_a_text_is_escaped() -> None:
    assert text(1, 2, "<a & b>") == '<text x="1" y="2" class="label">&lt;a &amp; b&gt;</text>'
    assert element("g", class_='"x"', rx=None, stroke_width=1.5) == '<g class="&quot;x&quot;" stroke-width="1.5"/>'
