"""`ProcessState`: what a process does for clients now, as a metric and as the first line of `/readyz`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ProcessState(StrEnum):
    INITIALIZING = "INITIALIZING"
    """It starts: it opens the remote tier, or has not read the cluster yet."""
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    """It accepts no more clients, and answers the requests in progress."""
    FAILED = "FAILED"
    """The brokers reject the proxy, or the process died and is about to be restarted."""


class StateMetric(Collector):
    """One time series per state: 1 for the present one, else 0."""

    def __init__(self, state: Callable[[], ProcessState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "tidegate_process_state", "1 for the state of the process, else 0.", labels=["state"]
        )
        present = self._state()
        for state in ProcessState:
            family.add_metric([state.value], float(state is present))
        yield family


def metrics_of_the_dead() -> str:
    """Returns the metrics of a process that does not answer."""
    registry = CollectorRegistry()
    registry.register(StateMetric(lambda: ProcessState.FAILED))
    return generate_latest(registry).decode()
