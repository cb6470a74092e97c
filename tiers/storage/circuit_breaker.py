"""`CircuitBreaker` leaves a store alone that failed several times in a row; there is one per location."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType

from tiers.errors import (
    CircuitOpenError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
    reason_of,
)

THRESHOLD = 8
OPEN_MS = 500
"""Below a second, so that a store that recovers can still serve the waiting fetches."""
HANGING_MS = 10_000


def loop_ms() -> int:
    """Returns the time of the running event loop in milliseconds."""
    return int(asyncio.get_running_loop().time() * 1000)


class CircuitBreaker:
    """A circuit breaker that opens after `THRESHOLD` failures in a row. Each call of the store runs `with` it.

    A call that was cancelled is a failure if `counts_cancelled`: the pool of readers cancels a download that hangs. It
    is no failure for a writer, which is cancelled when its partition is reassigned.

    While it is open, one call may probe the store `OPEN_MS` after the last one ended, or `HANGING_MS` after it began. A
    store that hangs keeps few callers.
    """

    def __init__(self, clock_ms: Callable[[], int], *, counts_cancelled: bool = True) -> None:
        self._clock_ms = clock_ms
        self._is_failure: tuple[type[BaseException], ...] = (RetriableRemoteStorageError,)
        if counts_cancelled:
            self._is_failure += (asyncio.CancelledError,)
        self._failures = 0
        self._reason = ""
        """Why the last call failed."""
        self._probe_at_ms = 0

    @property
    def is_open(self) -> bool:
        return self._failures >= THRESHOLD

    def __enter__(self) -> None:
        """Raises `CircuitOpenError` while the circuit is open."""
        if not self.is_open:
            return
        now_ms = self._clock_ms()
        if now_ms < self._probe_at_ms:
            raise CircuitOpenError(f"the store failed {self._failures} times in a row: {self._reason}")
        self._probe_at_ms = now_ms + HANGING_MS

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Records the outcome. A refusal is neither a success nor a failure: it says nothing about the next call."""
        if error is None or isinstance(error, RemoteResourceNotFoundError):
            self._failures = 0
            return
        if isinstance(error, self._is_failure):
            self._failures += 1
            self._reason = reason_of(error) if isinstance(error, RemoteStorageError) else "no answer in time"
        self._probe_at_ms = self._clock_ms() + OPEN_MS


class CircuitBreakers:
    """One circuit breaker per location of a store, so that a location in trouble holds up no other."""

    def __init__(self, clock_ms: Callable[[], int], *, counts_cancelled: bool = True) -> None:
        self._make = partial(CircuitBreaker, clock_ms, counts_cancelled=counts_cancelled)
        self._breakers: dict[str, CircuitBreaker] = {}

    def of(self, location: str) -> CircuitBreaker:
        if location not in self._breakers:
            self._breakers[location] = self._make()
        return self._breakers[location]

    def all(self) -> dict[str, CircuitBreaker]:
        """Returns the circuit breakers of the locations that were called. Home is called "home"."""
        return {location or "home": breaker for location, breaker in self._breakers.items()}

    @property
    def open_locations(self) -> list[str]:
        return [location or "home" for location, breaker in self._breakers.items() if breaker.is_open]
