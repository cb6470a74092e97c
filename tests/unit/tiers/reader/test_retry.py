"""Backoff never passes the deadline; a store that fails is left alone, but for one probe at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import CircuitOpenError
from tiers.reader.retry import BACKOFF_BASE_MS, BACKOFF_CAP_MS, CircuitBreaker, backoff_ms


@given(st.integers(1, 100), st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_is_jittered_within_its_bounds(failures: int, remaining_ms: int, jitter: float) -> None:
    pause_ms = backoff_ms(failures, remaining_ms, lambda: jitter)
    assert 0 <= pause_ms <= min(BACKOFF_CAP_MS, BACKOFF_BASE_MS * 2 ** (failures - 1), remaining_ms / 2)


def test_backoff_doubles_up_to_the_cap() -> None:
    assert [backoff_ms(n, 100_000, lambda: 1.0) for n in (1, 2, 3, 4, 5, 6, 60)] == [50, 100, 200, 400, 800, 1000, 1000]


def is_refused(breaker: CircuitBreaker) -> bool:
    try:
        breaker.before_call()
    except CircuitOpenError:
        return True
    return False


def test_the_breaker_opens_probes_and_closes() -> None:
    now = [0]
    breaker = CircuitBreaker(lambda: now[0], threshold=2, open_ms=500)
    breaker.record_failure()
    assert not is_refused(breaker)
    breaker.record_failure()
    assert is_refused(breaker)
    now[0] = 500
    assert [is_refused(breaker) for _ in range(3)] == [False, True, True]
    breaker.record_success()
    assert [is_refused(breaker) for _ in range(3)] == [False] * 3
