"""Backoff never passes the deadline."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiers.reader.retry import BACKOFF_BASE_MS, BACKOFF_CAP_MS, backoff_ms


@given(st.integers(1, 100), st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_is_jittered_within_its_bounds(failures: int, remaining_ms: int, jitter: float) -> None:
    pause_ms = backoff_ms(failures, remaining_ms, lambda: jitter)
    assert 0 <= pause_ms <= min(BACKOFF_CAP_MS, BACKOFF_BASE_MS * 2 ** (failures - 1), remaining_ms / 2)


def test_backoff_doubles_up_to_the_cap() -> None:
    assert [backoff_ms(n, 100_000, lambda: 1.0) for n in (1, 2, 3, 4, 5, 6, 60)] == [50, 100, 200, 400, 800, 1000, 1000]
