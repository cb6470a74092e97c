"""`ClockSkew`: how far the brokers' clock is ahead of ours, measured whenever a broker appends a record of ours.

The topic has LogAppendTime, and the answer to a Produce names it. It lies between sending and answer on a clock that
agrees with ours: by as much as it lies outside, the clocks differ. What was measured stays true while nobody sets our
clock: how much it was set since, the monotonic clock tells. It stands still while a machine sleeps, and a clock that is
set may be set right: who finds the clocks apart measures again before it believes that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Instant(NamedTuple):
    wall_ms: int
    monotonic_ms: int


class ClockSkew:
    def __init__(self, clock_ms: Callable[[], int], wall_clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        self._ahead_ms: int | None = None
        self._our_offset_ms = 0

    def now(self) -> Instant:
        return Instant(self._wall_clock_ms(), self._clock_ms())

    def observe(self, sent: Instant, append_time_ms: int) -> None:
        """A record that left at `sent`, or later, was appended at `append_time_ms`; its answer came just now."""
        if append_time_ms < 0:
            return
        answered = self.now()
        # On the clock as it is set now, be it that it was set in between.
        sent_at_ms = answered.wall_ms - (answered.monotonic_ms - sent.monotonic_ms)
        self._ahead_ms = min(0, append_time_ms - sent_at_ms) + max(0, append_time_ms - answered.wall_ms)
        self._our_offset_ms = answered.wall_ms - answered.monotonic_ms

    def skew_ms(self) -> int | None:
        """Positive: the brokers are ahead. None: nothing was measured yet."""
        if self._ahead_ms is None:
            return None
        now = self.now()
        return self._ahead_ms - (now.wall_ms - now.monotonic_ms - self._our_offset_ms)
