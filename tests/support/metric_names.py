"""The metrics and labels that a PromQL expression may name: those of the registry, and a few of Prometheus itself."""

from __future__ import annotations

import re
from math import prod

from proxy.commands.metrics_reference import all_metrics
from tiers.config.topic_policy import TierWork
from tiers.tasks.alarms import STATES, AlarmReason
from tiers.tasks.metrics import BOUNDS, STAGES, RemoteLogManagerMetrics

ADDED_LABELS = {"cluster", "instance", "job", "process"}
"""The scrape job adds the first three, and a proxy with workers the last."""
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
_OF_PROCESS = (
    "process_cpu_seconds_total", "process_max_fds", "process_open_fds", "process_resident_memory_bytes",
    "process_start_time_seconds", "process_virtual_memory_bytes",
)  # fmt: skip

LABELS_OF = {
    **{
        f"{spec.exposed_name}{suffix}": {*spec.labels, *({"le"} if suffix == "_bucket" else ())}
        for spec in all_metrics()
        for suffix in _SUFFIXES.get(spec.kind, ("",))
    },
    **{name: set[str]() for name in ("up", *_OF_PROCESS)},
}
"""The labels of each series, by its name."""

_SERIES = re.compile(r"\b(tidegate_\w+|process_\w+|up)\b(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")


def unknown_in(expression: str) -> set[str]:
    """Returns the names of metrics and labels in `expression` that do not exist."""
    unknown, known = set(), set(ADDED_LABELS)
    for name, selector in _SERIES.findall(re.sub(_GROUPING, "", expression)):
        labels = LABELS_OF.get(name)
        if labels is None:
            unknown.add(name)
            continue
        known |= labels
        named = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", selector))
        unknown |= named - labels - ADDED_LABELS
    grouped = {label.strip() for group in _GROUPING.findall(expression) for label in group.split(",") if label.strip()}
    return unknown | (grouped - known)


def series_per_topic() -> int:
    """Returns the most series that one topic adds to the process that copies it."""
    values = {"topic": 1, "bound": len(BOUNDS), "stage": len(STAGES), "work": len(TierWork)}
    return sum(
        prod(
            {**values, "reason": len(STATES if spec is RemoteLogManagerMetrics.alarm_gauge else AlarmReason)}[label]
            for label in spec.labels
        )
        for spec in all_metrics()
        if "topic" in spec.labels and not {"partition", "client_id"} & {*spec.labels}
    )


def series_per_partition() -> int:
    return sum("partition" in spec.labels for spec in all_metrics())
