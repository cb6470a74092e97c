"""The latency of the event loop: what timers meet, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from proxy.process.checks.loop_latency import INTERVAL_S, LoopLatency
from tests.support.simulation.loop import VirtualLoop

SECOND_TIMERS = round(1 / INTERVAL_S)


def measured(seconds: float, *held_up: tuple[float, float]) -> CollectorRegistry:
    """Returns the metrics of a loop that runs for so long. `held_up`: at which second, and for how long."""
    loop, registry = VirtualLoop(), CollectorRegistry()

    def hold_up(for_s: float) -> Callable[[], None]:
        def work() -> None:
            loop.now_s += for_s

        return work

    async def main() -> None:
        for at_s, for_s in held_up:
            loop.call_later(at_s, hold_up(for_s))
        with LoopLatency(loop, loop.time) as latency:
            registry.register(latency)
            await asyncio.sleep(seconds)

    loop.run_until_complete(main())
    loop.close()
    return registry


def count(registry: CollectorRegistry, at_most_s: float | None = None) -> float:
    """Returns the number of samples up to `at_most_s`; None: of all."""
    bound = "+Inf" if at_most_s is None else str(at_most_s)
    value = registry.get_sample_value("tidegate_event_loop_latency_seconds_bucket", {"le": bound})
    assert value is not None
    return value


def test_an_idle_loop_is_never_late() -> None:
    registry = measured(1.0)
    assert count(registry) >= SECOND_TIMERS - 1
    assert count(registry, 0.0005) == count(registry)


def test_a_hold_up_counts_for_every_timer_that_waits_for_its_end() -> None:
    registry = measured(1.0, (0.5, 0.2))
    late = count(registry) - count(registry, 0.0005)
    assert abs(late - 0.2 / INTERVAL_S) <= 1
    assert count(registry) - count(registry, 0.1) >= 0.1 / INTERVAL_S - 1
    assert count(registry, 0.2) == count(registry)


def test_a_process_that_was_stopped_for_hours_goes_on_at_once() -> None:
    registry = measured(0.1, (0.05, 3 * 3600.0))
    assert count(registry) < 2_000
    assert count(registry) - count(registry, 30.0) > 0
