"""`LoopLatency` measures how late the event loop runs what is due: the time that every client waits for the others.

A timer is due every 50 ms, and its lateness is a sample. When the loop is held up for longer, the timers that could not
be due meanwhile count too, each with the rest of the delay. So the samples tell what an event at a random time meets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from proxy.metrics import LatencyHistogram
from tiers.metric_spec import HistogramSpec

LATENCY = HistogramSpec("tidegate_event_loop_latency_seconds", "How late the event loop runs what is due.")

INTERVAL_S: Final = 0.05
"""A shorter one would wake each idle process more often, and costs more than all its other work."""
_COUNTED_TIMERS: Final = 1_000
"""The most timers that one delay counts for: a process that was stopped for hours must go on at once."""


class LoopLatency(Collector):
    """A context manager: it measures `loop` until it exits. `clock_s` is monotonic, and must be as exact as a timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock_s: Callable[[], float]) -> None:
        self.histogram = LatencyHistogram()
        self._loop = loop
        self._clock_s = clock_s
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._set_timer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def collect(self) -> Iterator[Metric]:
        latency = LATENCY.family()
        latency.add_metric([], self.histogram.buckets(), self.histogram.total_s)
        yield latency

    def _set_timer(self) -> None:
        self._due_s = self._clock_s() + INTERVAL_S
        self._timer = self._loop.call_later(INTERVAL_S, self._observe)

    def _observe(self) -> None:
        late_s = max(0.0, self._clock_s() - self._due_s)
        self.histogram.observe(late_s)
        for _ in range(min(int(late_s / INTERVAL_S), _COUNTED_TIMERS)):
            late_s -= INTERVAL_S
            self.histogram.observe(late_s)
        self._set_timer()
