"""Exponential backoff with full jitter, and a circuit breaker per remote store."""

from __future__ import annotations

from collections.abc import Callable

from tiers.errors import CircuitOpenError

BACKOFF_BASE_MS = 50
BACKOFF_CAP_MS = 1000


def backoff_ms(failures: int, remaining_ms: int, jitter: Callable[[], float]) -> float:
    """Returns the pause after the `failures`-th failure in a row, with factor 2 and full jitter.

    The pause is at most half of `remaining_ms`. `jitter` returns a number in [0, 1).
    """
    ceiling = min(BACKOFF_CAP_MS, BACKOFF_BASE_MS << min(max(failures - 1, 0), 10))
    return min(ceiling * jitter(), remaining_ms / 2)


class CircuitBreaker:
    """A circuit breaker that opens after `threshold` failures in a row.

    While it is open, one call may probe the store every `open_ms`. `open_ms` is below a second, so that a store that
    recovers can still serve the waiting fetches.
    """

    def __init__(self, clock_ms: Callable[[], int], *, threshold: int = 8, open_ms: int = 500) -> None:
        self._clock_ms = clock_ms
        self._threshold = threshold
        self._open_ms = open_ms
        self._failures = 0
        self._probe_at_ms = 0

    @property
    def is_open(self) -> bool:
        return self._failures >= self._threshold

    def before_call(self) -> None:
        """Raises `CircuitOpenError` while the circuit is open; otherwise the caller must record the call's outcome."""
        if not self.is_open:
            return
        now_ms = self._clock_ms()
        if now_ms < self._probe_at_ms:
            raise CircuitOpenError(f"the circuit breaker is open: the store failed {self._failures} times in a row")
        self._probe_at_ms = now_ms + self._open_ms

    def record_success(self) -> None:
        self._failures = 0

    def record_failure(self) -> None:
        self._failures += 1
        self._probe_at_ms = self._clock_ms() + self._open_ms
