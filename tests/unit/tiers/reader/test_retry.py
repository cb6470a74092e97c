"""Backoff never passes the deadline. A failing store gets one probe at a time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import CircuitOpenError, RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.reader.retry import BACKOFF_BASE_MS, BACKOFF_CAP_MS, CircuitBreaker, backoff_ms


@given(st.integers(1, 100), st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_is_jittered_within_its_bounds(failures: int, remaining_ms: int, jitter: float) -> None:
    pause_ms = backoff_ms(failures, remaining_ms, lambda: jitter)
    assert 0 <= pause_ms <= min(BACKOFF_CAP_MS, BACKOFF_BASE_MS * 2 ** (failures - 1), remaining_ms / 2)


def test_backoff_doubles_up_to_the_cap() -> None:
    assert [backoff_ms(n, 100_000, lambda: 1.0) for n in (1, 2, 3, 4, 5, 6, 60)] == [50, 100, 200, 400, 800, 1000, 1000]


def call(breaker: CircuitBreaker, error: BaseException | None = None) -> bool:
    """Makes a call that ends with `error`. Returns whether the breaker let it through."""
    is_let_through = False
    expected: list[type[BaseException]] = [CircuitOpenError] if error is None else [CircuitOpenError, type(error)]
    with suppress(*expected), breaker:
        is_let_through = True
        if error is not None:
            raise error
    return is_let_through


FAILURES = (RetriableRemoteStorageError("slow down"), asyncio.CancelledError())
SUCCESSES = (None, RemoteResourceNotFoundError("no such object"))


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("success", SUCCESSES)
def test_the_breaker_opens_probes_and_closes(failure: BaseException, success: BaseException | None) -> None:
    now = [0]
    breaker = CircuitBreaker(lambda: now[0], threshold=2, open_ms=500)
    assert call(breaker, failure)
    assert call(breaker, failure)
    assert not call(breaker)
    now[0] = 500
    assert call(breaker, failure)
    assert not call(breaker)
    now[0] = 1000
    refusal = RemoteStorageError("forbidden")
    assert [call(breaker, refusal) for _ in range(3)] == [True, False, False]
    now[0] = 1500
    assert call(breaker, success)
    assert [call(breaker) for _ in range(3)] == [True] * 3
