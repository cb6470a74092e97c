"""The registry of all metrics. Generates the tables of `docs/metrics.md`: what follows the mark `<!-- generated`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import proxy.handlers.fetch.handler
import proxy.metrics
import proxy.process.admin.process_alarms
import proxy.process.admin.process_state
import proxy.process.checks.loop_latency
import proxy.process.processes
import proxy.process.remote_reader
import tiers.fitness
import tiers.metadata.topic.metrics
import tiers.reader.metrics
import tiers.reader.read_accounts
import tiers.storage.metrics
import tiers.tasks.metrics
from tiers.metric_spec import FROM_THE_START, MetricSpec, specs_of

SECTIONS: Final[Mapping[str, tuple[ModuleType, ...]]] = {
    "Clients and brokers": (proxy.metrics,),
    "Remote reads": (
        proxy.handlers.fetch.handler,
        tiers.reader.metrics,
        tiers.reader.read_accounts,
        proxy.process.remote_reader,
    ),
    "Copying, trimming and retention": (tiers.tasks.metrics,),
    "Store": (tiers.storage.metrics,),
    "Metadata": (tiers.metadata.topic.metrics,),
    "Process": (
        tiers.fitness,
        proxy.process.admin.process_state,
        proxy.process.admin.process_alarms,
        proxy.process.checks.loop_latency,
        proxy.process.processes,
    ),
}
"""The sections of the page, with the modules that have the specs."""


def all_metrics() -> list[MetricSpec[Any, Any]]:
    return [spec for modules in SECTIONS.values() for module in modules for spec in specs_of(module)]


def reference() -> str:
    lines = []
    for title, modules in SECTIONS.items():
        lines += ["", f"## {title}", "", "| Metric | Type | Labels | Unit | Meaning |", "|---|---|---|---|---|"]
        lines += [_row(spec) for module in modules for spec in specs_of(module)]
    return "\n".join(lines) + "\n"


def _row(spec: MetricSpec[Any, Any]) -> str:
    kafka = f" In Kafka: {spec.kafka}." if spec.kafka else ""
    since = "" if spec.since == FROM_THE_START else f" Exists {spec.since}."
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"| `{spec.exposed_name}` | {spec.kind} | {labels} | {spec.unit} | {spec.meaning}{kafka}{since} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
