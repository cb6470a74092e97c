"""The state of a process as a metric, and as the first line of `/servez` and `/readyz`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest

from proxy.admin.facts import ProcessState
from tiers.metric_spec import GaugeSpec

SERVES_NO_CLIENTS: Final = "this process serves no clients"
STATE_LINE: Final = "state: "
"""How the first line of `/servez` and `/readyz` begins if the answer is 503. The state follows."""
STATE = GaugeSpec("tidegate_process_state", "1 for the state of the process, else 0.", ("state",))


def register_state(registry: CollectorRegistry, present: Callable[[], ProcessState]) -> None:
    """Makes one time series per state: 1 for the present one, else 0."""
    metric = STATE.metric(registry)
    for state in ProcessState:
        metric.labels(state.value).set_function(partial(lambda named: float(named is present()), state))


def metrics_of_the_dead() -> str:
    """Returns the metrics of a process that does not answer."""
    registry = CollectorRegistry()
    register_state(registry, lambda: ProcessState.FAILED)
    return generate_latest(registry).decode()
