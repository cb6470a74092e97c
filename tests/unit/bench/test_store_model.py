"""The rate of a connection of a modelled store, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.rig.store_model import BURST_S, Pace

RATE = 1_000_000.0


def test_a_late_caller_loses_no_rate() -> None:
    """A caller that always wakes up 2 ms late still passes the bytes of the whole time."""
    pace, now_s = Pace(RATE), 100.0
    for _ in range(1000):
        now_s = max(now_s, pace.passed_at(now_s, 10_000)) + 0.002
    assert 1000 * 10_000 / (now_s - 100.0) == pytest.approx(RATE, rel=0.01)


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
