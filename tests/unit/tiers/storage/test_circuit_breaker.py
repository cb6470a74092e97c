"""A store that fails is left alone, but for one probe at a time, and each location for itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tiers.errors import CircuitOpenError, RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.circuit_breaker import HANGING_MS, OPEN_MS, THRESHOLD, CircuitBreaker, CircuitBreakers


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


def failing(failure: BaseException, now: list[int]) -> CircuitBreaker:
    """Returns a breaker that opens with the next failure."""
    breaker = CircuitBreaker(lambda: now[0])
    assert all(call(breaker, failure) for _ in range(THRESHOLD - 1))
    assert not breaker.is_open
    return breaker


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("success", SUCCESSES)
def test_the_breaker_opens_probes_and_closes(failure: BaseException, success: BaseException | None) -> None:
    now = [0]
    breaker = failing(failure, now)
    for now[0] in (0, OPEN_MS):
        assert call(breaker, failure)
        assert not call(breaker)
    now[0] = 2 * OPEN_MS
    refusal = RemoteStorageError("forbidden")
    assert [call(breaker, refusal) for _ in range(3)] == [True, False, False]
    now[0] = 3 * OPEN_MS
    assert call(breaker, success)
    assert [call(breaker) for _ in range(3)] == [True] * 3


def test_a_store_that_hangs_keeps_one_caller_for_a_while() -> None:
    now = [0]
    breaker = failing(FAILURES[0], now)
    assert call(breaker, FAILURES[0])
    now[0] = OPEN_MS
    with suppress(RetriableRemoteStorageError), breaker:
        now[0] += HANGING_MS - 1
        assert not call(breaker)
        now[0] += 1
        assert call(breaker, FAILURES[0])
        now[0] += OPEN_MS - 1
        assert not call(breaker)
        raise FAILURES[0]
    now[0] += OPEN_MS - 1
    assert not call(breaker)
    now[0] += 1
    assert call(breaker)


def test_a_cancelled_write_is_no_failure() -> None:
    breaker = CircuitBreaker(lambda: 0, counts_cancelled=False)
    assert all(call(breaker, asyncio.CancelledError()) for _ in range(THRESHOLD + 1))


def test_a_location_called_home_does_not_hide_home() -> None:
    breakers = CircuitBreakers(lambda: 0)
    while call(breakers.of(""), FAILURES[0]):
        assert call(breakers.of("home"))
    assert breakers.open_locations == ["home"]
