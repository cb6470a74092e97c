"""The state of a process as a metric, and as the first line of `/servez` and `/readyz`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from proxy.admin.facts import ProcessState
from tiers.metric_spec import GaugeSpec

SERVES_NO_CLIENTS: Final = "this process serves no clients"
STATE_LINE: Final = "state: "
"""How the first line of `/servez` and `/readyz` begins if the answer is 503. The state follows."""
STATE = GaugeSpec("tidegate_process_state", "1 for the state of the process, else 0.", ("state",))


class StateMetric(Collector):
    """One time series per state: 1 for the present one, else 0."""

    def __init__(self, state: Callable[[], ProcessState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        family = STATE.family()
        present = self._state()
        for state in ProcessState:
            family.add_metric([state.value], float(state is present))
        yield family


def metrics_of_the_dead() -> str:
    """Returns the metrics of a process that does not answer."""
    registry = CollectorRegistry()
    registry.register(StateMetric(lambda: ProcessState.FAILED))
    return generate_latest(registry).decode()
