"""The alert rules use metrics and labels that exist, and every alert has a test that promtool runs."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.metric_names import unknown_in
from tests.support.repository import ROOT
from tests.support.tools import programs

FOLDER = ROOT / "deploy" / "prometheus"
RULES = FOLDER / "tidegate-alerts.yaml"
TESTS = sorted((FOLDER / "tests").glob("*.yaml"))
ALL: list[dict[str, Any]] = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_the_rules_use_metrics_and_labels_that_exist() -> None:
    assert {rule["alert"]: found for rule in ALL if (found := unknown_in(rule["expr"]))} == {}


def test_an_alert_has_a_severity_two_texts_and_a_page() -> None:
    for rule in ALL:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"].keys() == {"severity"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["description"].endswith(".")
        assert (ROOT / rule["annotations"]["runbook_url"]).is_file()


def test_every_alert_is_tested_while_it_is_silent_and_while_it_fires() -> None:
    checks: Counter[tuple[str, bool]] = Counter()
    for path in TESTS:
        text = path.read_text()
        assert unknown_in(" ".join(re.findall(r"series: '(.+)'", text))) == set()
        for case in yaml.safe_load(text)["tests"]:
            for check in case["alert_rule_test"]:
                checks[check["alertname"], bool(check.get("exp_alerts"))] += 1
                assert all(alert["exp_labels"]["cluster"] for alert in check.get("exp_alerts", ()))
    assert {name for name, _ in checks} == {rule["alert"] for rule in ALL}
    assert all(checks[rule["alert"], fires] for rule in ALL for fires in (True, False))


def test_the_written_rules_have_links_to_the_runbook(tmp_path: Path) -> None:
    written = tmp_path / "rules" / "alerts.yaml"
    command = ["make", "alerts", f"ALERTS={written}"]
    silent = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ("say RUNBOOKS=URL" in silent.stderr, written.exists()) == (True, False)
    subprocess.run([*command, "RUNBOOKS=https://example.org/r/"], cwd=ROOT, check=True)
    rules = [rule for group in yaml.safe_load(written.read_text())["groups"] for rule in group["rules"]]
    assert [rule["annotations"]["runbook_url"] for rule in rules] == [
        rule["annotations"]["runbook_url"].replace("docs/runbook", "https://example.org/r") for rule in ALL
    ]


@pytest.mark.full
def test_promtool_accepts_the_rules() -> None:
    assert f"SUCCESS: {len(ALL)} rules found" in programs.run("promtool", "check", "rules", "--lint=all", str(RULES))


@pytest.mark.full
def test_promtool_accepts_the_scrape_job() -> None:
    """The file of the token is on another machine, so only the syntax is checked."""
    programs.run("promtool", "check", "config", "--syntax-only", str(FOLDER / "prometheus.yaml"))


@pytest.mark.full
def test_the_rules_pass_their_tests() -> None:
    programs.run("promtool", "test", "rules", *map(str, TESTS))
