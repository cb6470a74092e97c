"""Every log line of the level ERROR is an alarm with a runbook page. Every state has a gauge, an alert and a card.

docs/alarms.md lists the alarms, and the rules of Prometheus name the page of each.
"""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import yaml
from prometheus_client import CollectorRegistry

from proxy.admin.html import Renderer
from proxy.admin.runbook import runbook_link, runbook_page
from proxy.admin.source import raised
from proxy.commands.metrics_reference import all_metrics
from proxy.log_events import ALARMS
from proxy.process.admin.process_alarms import ProcessAlarm, ProcessAlarms
from proxy.process.admin.process_view import RunningTasks, raised_alarms
from tests.support.log_lines import error_phrases, sources
from tests.support.repository import ROOT
from tiers.errors import Peer
from tiers.fitness import STORE_PROBE
from tiers.metric_spec import GaugeSpec
from tiers.tasks.alarms import EVENTS, STATES, AlarmReason
from tiers.tasks.metrics import RemoteLogManagerMetrics

RULES = yaml.safe_load((ROOT / "deploy/prometheus/tidegate-alerts.yaml").read_text())
PAGES_OF_EXPRESSIONS = [
    (rule["expr"], rule["annotations"]["runbook_url"]) for group in RULES["groups"] for rule in group["rules"]
]
PAGE = (ROOT / "docs" / "alarms.md").read_text()


class Alarm(NamedTuple):
    """A row of docs/alarms.md. `series` is in the words of PromQL; empty: none shows the alarm."""

    section: str
    name: str
    page: str
    series: str


def alarms() -> list[Alarm]:
    found = []
    for section in PAGE.split("\n## ")[1:]:
        gauge = re.search(r"The gauge `(\w+)` has the labels? .*`(reason|alarm)`", section)
        for name, page, rest in re.findall(r"^\| \[([\w-]+)\]\(runbook/([\w-]+)\.md\) \|(.*)", section, re.MULTILINE):
            metric = re.match(r" `(tidegate_[^`]+)`", rest)
            series = f'{gauge[1]}{{{gauge[2]}="{name}"}}' if gauge else metric[1] if metric else ""
            found.append(Alarm(section.partition("\n")[0], name, page, series))
    return found


LISTED = alarms()
TOPIC, TIER, PROCESS, EVENT = dict.fromkeys(alarm.section for alarm in LISTED)


def names(section: str) -> set[str]:
    return {alarm.name for alarm in LISTED if alarm.section == section}


def named_in_code(enumeration: str) -> set[str]:
    """Returns the members of an enumeration that code outside of its module names."""
    return {
        node.attr
        for path, module in sources()
        if path.name not in ("alarms.py", "process_alarms.py")
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == enumeration
    }


def test_every_error_line_is_an_alarm_with_a_page() -> None:
    assert error_phrases() == ALARMS.keys()
    assert set(ALARMS.values()) == {alarm.page for alarm in LISTED}
    assert all((ROOT / "docs" / "runbook" / f"{alarm.page}.md").is_file() for alarm in LISTED)


def test_the_states_of_topics_are_the_reasons_with_a_state() -> None:
    assert names(TOPIC) == set(STATES)
    assert names(EVENT) >= EVENTS
    assert named_in_code("AlarmReason") == {reason.name for reason in AlarmReason}


def test_the_states_of_a_process_are_those_of_the_gauge() -> None:
    assert names(PROCESS) == set(ProcessAlarm)
    assert named_in_code("ProcessAlarm") == {alarm.name for alarm in ProcessAlarm}


def test_the_reasons_that_happen_are_the_events() -> None:
    """A state begins and ends."""
    happened = {
        argument.attr
        for _, module in sources()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "happened"
        for argument in node.args
        if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "AlarmReason"
    }
    assert happened == {reason.name for reason in EVENTS}


@pytest.mark.parametrize("alarm", [alarm for alarm in LISTED if alarm.series], ids=lambda alarm: alarm.name)
def test_every_state_and_counter_has_an_alert_with_its_page(alarm: Alarm) -> None:
    series = re.escape(alarm.series)
    asked = rf"increase\({series}" if alarm.section == EVENT else rf"{series}\)? > 0"
    pages = {page for expression, page in PAGES_OF_EXPRESSIONS if re.search(asked, expression)}
    assert f"docs/runbook/{alarm.page}.md" in pages
    gauges = {spec.exposed_name for spec in all_metrics() if isinstance(spec, GaugeSpec)}
    assert (alarm.series.partition("{")[0] in gauges) is (alarm.section != EVENT)


def test_every_state_has_a_series_of_its_own() -> None:
    assert all(alarm.series for alarm in LISTED if alarm.section != EVENT)
    series = [alarm.series for alarm in LISTED if alarm.series]
    assert sorted(set(series)) == sorted(series)


def test_the_page_shows_every_state_of_a_topic() -> None:
    alarms = RemoteLogManagerMetrics(CollectorRegistry()).alarms
    for reason in STATES:
        alarms.begin("orders", reason, "orders-0", "why")
    assert {alarm.name for alarm in raised(alarms.active())} == set(STATES)
    for reason in STATES:
        alarms.end("orders", reason, "orders-0")
    assert raised(alarms.active()) == []


def test_the_page_shows_every_state_of_the_tier() -> None:
    refused = {"compacted": "the cleanup.policy is compact", "of-a-pattern": "the same"}
    topics = SimpleNamespace(refused=refused, is_expected=lambda topic: topic == "compacted")
    running = RunningTasks(cast(Any, SimpleNamespace(alarms=list)), cast(Any, topics))
    log = SimpleNamespace(status=lambda: SimpleNamespace(alarm="records were lost"))
    metadata = cast(Any, SimpleNamespace(log=log))
    fitness = cast(Any, SimpleNamespace(reason="store: connection refused", failing=[STORE_PROBE]))
    found = list(raised_alarms(running, metadata, fitness))
    assert {alarm.name for alarm in found} == names(TIER)
    assert [alarm.about for alarm in found] == ["the remote log metadata", "this process", "compacted"]
    assert [alarm.waits_for for alarm in found] == [None, Peer.STORE, None]


def test_the_page_shows_every_state_of_a_process() -> None:
    alarms = ProcessAlarms()
    for alarm in ProcessAlarm:
        alarms.watch(alarm, lambda: ["one", "two"])
    assert [each.name for each in alarms.raised()] == [name for name in sorted(ProcessAlarm) for _ in range(2)]
    (family,) = alarms.collect()
    assert {sample.labels["alarm"]: sample.value for sample in family.samples} == dict.fromkeys(ProcessAlarm, 2)


@pytest.mark.parametrize("alarm", LISTED, ids=lambda alarm: alarm.name)
def test_the_proxy_shows_the_page_of_every_alarm(alarm: Alarm) -> None:
    assert runbook_link(alarm.name) == f"/runbook/{alarm.page}"
    page = runbook_page(alarm.name)
    assert page is not None
    assert all((page.title, page.what_to_do))
    html = Renderer("1.0").runbook(alarm.page)
    assert html is not None
    assert "What is at risk" in html
    assert not re.search(r"`|\]\(|\.md\"", html)


def test_a_page_that_does_not_exist_has_no_text() -> None:
    assert [runbook_page(name) for name in ("none", "index", "../runbook/gap", "")] == [None] * 4
    assert runbook_link("a/b?c") == "/runbook/a%2Fb%3Fc"


def test_the_metrics_of_the_page_exist() -> None:
    exposed = {spec.exposed_name for spec in all_metrics()}
    assert set(re.findall(r"`(tidegate_\w+)`", PAGE)) <= exposed
