"""`ClockSkew` measures how far the brokers' clock is ahead of this machine's clock.

It measures whenever a broker appends a record of this process. The topic has LogAppendTime, and the response to a
Produce contains that time. If the clocks agree, the append time lies between the request and the response. Otherwise
the clocks differ by the distance between the append time and that interval.

A measurement stays valid while nobody sets this machine's clock. The monotonic clock shows by how much the clock was
set since, and `skew_ms` corrects the measurement by that. But the monotonic clock stands still while a machine sleeps,
and a wrong clock may be set right. So a caller that finds a large skew measures again before it believes the result.
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
        """Measures with a record that was sent at `sent` or later. The response arrived just now.

        `append_time_ms` is the broker's LogAppendTime; a negative one is ignored."""
        if append_time_ms < 0:
            return
        answered = self.now()
        # The time of sending on the clock as it is set now: the clock may have been set since.
        sent_at_ms = answered.wall_ms - (answered.monotonic_ms - sent.monotonic_ms)
        self._ahead_ms = min(0, append_time_ms - sent_at_ms) + max(0, append_time_ms - answered.wall_ms)
        self._our_offset_ms = answered.wall_ms - answered.monotonic_ms

    def skew_ms(self) -> int | None:
        """Returns the skew: positive when the brokers are ahead, None before the first measurement."""
        if self._ahead_ms is None:
            return None
        now = self.now()
        return self._ahead_ms - (now.wall_ms - now.monotonic_ms - self._our_offset_ms)
