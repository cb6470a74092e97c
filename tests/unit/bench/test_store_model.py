"""The rate of a connection of a modelled store, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.rig.store_model import BURST_S, FAR, NEAR, Pace, StoreModel

RATE = 1_000_000.0


def test_bytes_take_their_time() -> None:
    pace = Pace(RATE)
    assert pace.passed_at(100.0, 500_000) == pytest.approx(100.5 - BURST_S)
    assert pace.passed_at(100.5, 500_000) == pytest.approx(101.0 - BURST_S)


def test_bytes_wait_for_those_before_them() -> None:
    pace = Pace(RATE)
    pace.passed_at(100.0, 1_000_000)
    assert pace.passed_at(100.0, 1_000_000) == pytest.approx(102.0 - BURST_S)


def test_a_late_caller_loses_no_rate() -> None:
    """A caller that always wakes up 2 ms late still passes the bytes of the whole time."""
    pace, now_s = Pace(RATE), 100.0
    for _ in range(1000):
        now_s = max(now_s, pace.passed_at(now_s, 10_000)) + 0.002
    assert 1000 * 10_000 / (now_s - 100.0) == pytest.approx(RATE, rel=0.01)


def test_an_idle_connection_saves_up_no_more_than_a_burst() -> None:
    pace = Pace(RATE)
    pace.passed_at(100.0, 1)
    assert pace.passed_at(500.0, 1_000_000) == pytest.approx(501.0 - BURST_S)


def test_a_rate_of_0_is_unlimited() -> None:
    pace = Pace(0)
    assert [pace.passed_at(now_s, 1 << 30) for now_s in (5.0, 5.0, 6.0)] == [5.0, 5.0, 6.0]


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 1 << 20)), min_size=1, max_size=50))
def test_no_span_passes_more_than_its_rate_and_one_burst(steps: list[tuple[float, int]]) -> None:
    """A caller waits until the returned time, then delivers, and then takes its next bytes after a pause."""
    pace, now_s = Pace(RATE), 100.0
    delivered: list[tuple[float, int]] = []
    for pause_s, count in steps:
        now_s = max(now_s + pause_s, pace.passed_at(now_s + pause_s, count))
        delivered.append((now_s, count))
    for first in range(len(delivered)):
        total = 0
        for at_s, count in delivered[first + 1 :]:
            total += count
            assert total <= RATE * (at_s - delivered[first][0] + BURST_S) + 1e-3


@pytest.mark.parametrize(
    ("model", "text"),
    [(FAR, "far (60 ms, 80 MB/s)"), (NEAR, "near (5 ms, 1 GB/s)"), (StoreModel("plain", 0, 0), "plain")],
)
def test_a_model_names_its_delay_and_its_rate(model: StoreModel, text: str) -> None:
    assert str(model) == text
