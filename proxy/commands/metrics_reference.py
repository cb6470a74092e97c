"""The registry of all metrics. Generates `docs/metrics.md` from it.

`python -m proxy.commands.metrics_reference > docs/metrics.md` writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
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
from proxy.admin.facts import ProcessState
from proxy.process.admin.process_alarms import ProcessAlarm
from tiers.config.topic_policy import TierWork
from tiers.metric_spec import FROM_THE_START, MetricSpec, specs_of
from tiers.reader.read_accounts import MAX_CLIENTS, MAX_TOPICS, OTHERS
from tiers.tasks.alarms import STATES, AlarmReason
from tiers.tasks.metrics import BOUNDS, STAGES, RemoteLogManagerMetrics

SECTIONS: Final[tuple[tuple[str, str, tuple[ModuleType, ...]], ...]] = (
    ("Clients and brokers", "Every process that serves clients has these.", (proxy.metrics,)),
    (
        "Remote reads",
        "The process that serves clients has `tidegate_remote_fetch_*`. The process that reads the store has "
        "`tidegate_remote_reader_*` and `tidegate_remote_client_*`.",
        (proxy.handlers.fetch.handler, tiers.reader.metrics, tiers.reader.read_accounts, proxy.process.remote_reader),
    ),
    ("Copying, trimming and retention", "The process that copies has these.", (tiers.tasks.metrics,)),
    (
        "Store",
        "Every process that uses the store has these.",
        (tiers.storage.metrics,),
    ),
    ("Metadata", "The process that copies has these.", (tiers.metadata.topic.metrics,)),
    (
        "Process",
        "The client library adds `process_*`: CPU time, memory, open files and the start time.",
        (
            tiers.fitness,
            proxy.process.admin.process_state,
            proxy.process.admin.process_alarms,
            proxy.process.checks.loop_latency,
            proxy.process.processes,
        ),
    ),
)
"""The metrics, as sections of the page: a title, a sentence, and the modules that have the specs."""

LABELS: Final = {
    "alarm": f"One of {len(ProcessAlarm)} alarms about a process, in docs/alarms.md.",
    "api": "Kafka's name of an API. All keys that Kafka does not know share the value `Unknown`.",
    "bound": f'One of {len(BOUNDS)} bounds: `{"`, `".join(BOUNDS)}`. See docs/design.md, "Words".',
    "cache": "In memory: `chunk`, `index`. In files: `chunk_files`, `index_files`.",
    "cause": f"Why a connection ended, one of {len(proxy.metrics.CLOSE_CAUSES)}: "
    f"`{'`, `'.join(proxy.metrics.CLOSE_CAUSES)}`.",
    "client_id": f"A client id as its clients gave it; at most {MAX_CLIENTS} in a process, the rest is `{OTHERS}`.",
    "completion": "`satisfied`, `expired` or `cancelled`.",
    "kind": "`retriable`, `not_found` or `refused`.",
    "location": "A location of the settings file; `home` for `[storage]` itself.",
    "metadata_partition": "A partition of the metadata topic.",
    "operation": f"One of {len(tiers.storage.metrics.OPERATIONS)} calls of a storage manager.",
    "partition": "A partition of the topic.",
    "pool": "`chunk` or `index`.",
    "process": "A process of the proxy. Every series has this label.",
    "python_version": "The version of Python.",
    "reason": f"Of an alarm: one of {len(AlarmReason)} in docs/alarms.md, of which {len(STATES)} have a state. Of a "
    f"refused connection: one of {len(proxy.metrics.REJECT_REASONS)} settings.",
    "stage": f"One of {len(STAGES)} stages: `{'`, `'.join(STAGES)}`.",
    "state": f"One of {len(ProcessState)}: `{'`, `'.join(ProcessState)}`.",
    "store": "The name of the storage manager in the settings.",
    "tier": "`local`, `remote`, or `none` for an API without records.",
    "topic": "A tiered topic of which the process copies a partition, or did in the last hour.",
    "version": "The version of Tidegate.",
    "work": f"What an operator can pause, one of {len(TierWork)}: `{'`, `'.join(TierWork)}`.",
}
"""Every label, and what bounds its values."""


def all_metrics() -> list[MetricSpec[Any]]:
    return [spec for _, _, modules in SECTIONS for module in modules for spec in specs_of(module)]


def series_per_topic() -> int:
    """Returns the most series that one topic adds to the process that copies it."""
    return sum(
        _combinations(spec)
        for spec in all_metrics()
        if "topic" in spec.labels and not {"partition", "client_id"} & {*spec.labels}
    )


def _combinations(spec: MetricSpec[Any]) -> int:
    """Returns how many series a metric of a topic has."""
    reasons = len(STATES) if spec is RemoteLogManagerMetrics.alarm_gauge else len(AlarmReason)
    values = {"topic": 1, "reason": reasons, "bound": len(BOUNDS), "stage": len(STAGES), "work": len(TierWork)}
    return prod(values[label] for label in spec.labels)


def series_per_partition() -> int:
    return sum("partition" in spec.labels for spec in all_metrics())


def _series_per_client() -> int:
    return sum("client_id" in spec.labels for spec in all_metrics())


INTRODUCTION = """\
# Metrics

The admin port has the metrics at `/metrics`, in Prometheus's text format. `proxy/commands/metrics_reference.py`
generates this page from the code. The names are those of Kafka's own tiered storage (KIP-405, KIP-956, KIP-963) where
Kafka has the same number, in Prometheus's spelling: a rate per second in Kafka is a counter here.

A series exists from the start of its process with the value 0, unless the page says otherwise. The series of a topic
and of a partition exist since the process took the partition over. The gauges of a partition end with the ownership.
The series of a topic end an hour after the process has given up its last partition.

The supervisor answers for all processes, and every series has the label `process`. So add up over the processes:
`sum without (process) (...)`.

docs/alarms.md says which metrics are alarms. `deploy/prometheus/tidegate-alerts.yaml` has the alert rules, and
`deploy/grafana/tidegate.json` a dashboard.
"""


def reference() -> str:
    lines = [INTRODUCTION]
    for title, sentence, modules in SECTIONS:
        lines += [
            f"## {title}",
            "",
            sentence,
            "",
            "| Metric | Type | Labels | Unit | Meaning |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(spec) for module in modules for spec in specs_of(module)]
        lines.append("")
    lines += [*_labels(), "", *_cardinality()]
    return "\n".join(lines) + "\n"


def _row(spec: MetricSpec[Any]) -> str:
    kafka = f" In Kafka: {spec.kafka}." if spec.kafka else ""
    since = "" if spec.since == FROM_THE_START else f" Exists {spec.since}."
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"| `{spec.exposed_name}` | {spec.kind} | {labels} | {spec.unit} | {spec.meaning}{kafka}{since} |"


def _labels() -> Iterator[str]:
    yield from ("## Labels", "", "| Label | Values |", "|---|---|")
    used = {label for spec in all_metrics() for label in spec.labels}
    yield from (f"| `{label}` | {meaning} |" for label, meaning in LABELS.items() if label in used)


def _cardinality() -> Iterator[str]:
    yield "## How many series there are"
    yield ""
    yield "No record can add a series. The settings, the tiered topics and the client ids decide how many there are."
    yield f"A client id adds {_series_per_client()} series for each topic that it reads from the remote tier."
    yield f"A process has at most {MAX_CLIENTS} client ids, and at most {MAX_TOPICS} topics of each. The rest counts as"
    yield f"`{OTHERS}`."
    yield f"A topic adds {series_per_topic()} series to each process that copies a partition of it. A partition adds"
    yield f"{series_per_partition()} series to the process that copies it."


if __name__ == "__main__":
    sys.stdout.write(reference())
