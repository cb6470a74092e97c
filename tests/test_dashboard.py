"""The Grafana dashboard uses metrics and labels that exist, and its panels lie in rows beside each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from proxy.commands.metrics_reference import all_metrics
from tests.support.metric_names import LABELS_OF, unknown_in
from tests.support.repository import ROOT
from tests.support.tools import programs

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/tidegate.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in GRAPHS for target in panel["targets"]]
SUFFIXES = ("", "_bucket", "_sum", "_count")
NOT_SHOWN = {
    "tidegate_remote_copy_lag_segments",  # beside the bytes
    "tidegate_remote_delete_lag_bytes",  # beside the segments
}
"""The metrics that are left out."""


OF_ALL_TOPICS = "Days until uncopied records fill the disk"
"""This panel compares the records of all topics with a disk."""


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_a_query_names_what_exists_and_filters_by_the_choices(title: str, expression: str) -> None:
    assert unknown_in(expression) == set()
    for name in re.findall(r"\btidegate_\w+|process_\w+(?=\{)", expression):
        choices = ["cluster", "instance"]
        if "topic" in LABELS_OF[name] and title != OF_ALL_TOPICS:
            choices.append("topic")
        selector = ",".join(f'{each}=~"${each}"' for each in choices)
        assert f"{name}{{{selector}" in expression, f"{title} does not filter by {choices}"


def test_the_choices_come_from_metrics_that_exist() -> None:
    variables = DASHBOARD["templating"]["list"]
    assert [each["name"] for each in variables] == ["datasource", "cluster", "instance", "topic", "disk_gib"]
    for each in (each for each in variables if each["type"] == "query"):
        matched = re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", each["definition"])
        assert matched is not None
        metric, selector, label = matched.groups()
        assert label == each["name"]
        assert unknown_in(f"sum by ({label}) ({metric}{selector or ''})") == set()
        assert (each["allValue"], each["query"]["query"]) == (".*", each["definition"])  # also series without the label


@pytest.mark.parametrize("panel", GRAPHS, ids=lambda panel: panel["title"])
def test_a_legend_names_labels_of_its_query(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        grouped = {
            label.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(",")
        }
        named = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
        assert named <= grouped | ({"instance"} if "by (" not in target["expr"] else set())


def test_every_metric_is_shown_or_left_out_on_purpose() -> None:
    series = {name for _, query in QUERIES for name in re.findall(r"\w+(?=\{)", query)}
    shown = {spec.name for spec in all_metrics() if series & {f"{spec.exposed_name}{each}" for each in SUFFIXES}}
    assert {spec.name for spec in all_metrics()} - shown == NOT_SHOWN


@pytest.mark.full
def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": expression.replace("$__rate_interval", "5m").replace("$disk_gib", "500")}
        for number, (_, expression) in enumerate(QUERIES)
    ]
    path = tmp_path / "queries.json"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(QUERIES)} rules found" in programs.run("promtool", "check", "rules", str(path))
