"""Every log line of the level ERROR is an alarm in words. Every state has a gauge, an alert and a card on the page.

`proxy/admin/alarms/catalogue.py` is the one list. docs/alarms.md is generated from it.
"""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from prometheus_client import CollectorRegistry

from proxy.admin.alarm import Alarm, Kind
from proxy.admin.alarms.catalogue import ALARMS, BY_NAME, runbook_of
from proxy.admin.html import Renderer
from proxy.admin.source import raised
from proxy.commands.alarm_reference import reference
from proxy.commands.metrics_reference import all_metrics
from proxy.log_events import ALARMS as EVENTS_OF_LINES
from proxy.log_events import SHARED_PAGES
from proxy.process.admin.process_alarms import ProcessAlarm, ProcessAlarms
from proxy.process.admin.process_view import RunningTasks, raised_alarms
from tests.support.log_lines import error_phrases, sources
from tests.support.repository import ROOT
from tiers.errors import Peer
from tiers.fitness import STORE_PROBE
from tiers.metric_spec import GaugeSpec
from tiers.tasks.alarms import EVENTS, STATES, AlarmReason
from tiers.tasks.metrics import RemoteLogManagerMetrics

RULES = (ROOT / "deploy/prometheus/tidegate-alerts.yaml").read_text()
EXPRESSIONS = [rule["expr"] for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]]


def names(*kinds: Kind) -> set[str]:
    return {alarm.name for alarm in ALARMS if alarm.kind in kinds}


def named_in_code(enumeration: str) -> set[str]:
    """Returns the members of an enumeration that code outside of its module names."""
    return {
        node.attr
        for path, module in sources()
        if path.name not in ("alarms.py", "process_alarms.py")
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == enumeration
    }


def test_the_page_is_generated_from_the_catalogue() -> None:
    said = "python -m proxy.commands.alarm_reference > docs/alarms.md"
    assert (ROOT / "docs" / "alarms.md").read_text() == reference(), said


def test_every_error_line_is_in_one_alarm() -> None:
    said = [line for alarm in ALARMS for line in alarm.lines]
    assert len(said) == len(set(said))
    assert set(said) == error_phrases() == set(EVENTS_OF_LINES)


def test_an_alarm_has_the_name_of_its_event() -> None:
    """An alarm of several events has the name of their page."""
    assert len({alarm.name for alarm in ALARMS}) == len(ALARMS)
    for alarm in ALARMS:
        events = {EVENTS_OF_LINES[line] for line in alarm.lines}
        assert events == {alarm.name} or events == set(SHARED_PAGES[alarm.name])
        assert {BY_NAME[event].runbook for event in events} == {alarm.runbook}


def test_the_states_of_topics_are_the_reasons_with_a_state() -> None:
    assert names(Kind.TOPIC) == set(STATES)
    assert names(Kind.EVENT) >= EVENTS
    assert named_in_code("AlarmReason") == {reason.name for reason in AlarmReason}


def test_the_states_of_a_process_are_those_of_the_gauge() -> None:
    assert names(Kind.PROCESS) == set(ProcessAlarm)
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


@pytest.mark.parametrize("alarm", [alarm for alarm in ALARMS if alarm.is_state], ids=lambda alarm: alarm.name)
def test_every_state_is_a_gauge_with_an_alert(alarm: Alarm) -> None:
    gauges = {spec.exposed_name for spec in all_metrics() if isinstance(spec, GaugeSpec)}
    assert alarm.series.partition("{")[0] in gauges
    assert any(re.search(rf"{re.escape(alarm.series)}\)? > 0", expression) for expression in EXPRESSIONS)


@pytest.mark.parametrize("alarm", [alarm for alarm in ALARMS if not alarm.is_state], ids=lambda alarm: alarm.name)
def test_every_event_with_a_counter_has_an_alert(alarm: Alarm) -> None:
    if alarm.metric:
        assert alarm.metric.partition("{")[0] in {spec.exposed_name for spec in all_metrics()}
        assert any(f"increase({alarm.metric}" in expression for expression in EXPRESSIONS)


def test_each_series_shows_one_alarm() -> None:
    series = [alarm.series for alarm in ALARMS if alarm.series]
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
    assert {alarm.name for alarm in found} == names(Kind.TIER)
    assert [alarm.about for alarm in found] == ["the remote log metadata", "this process", "compacted"]
    assert [alarm.waits_for for alarm in found] == [None, Peer.STORE, None]


def test_the_page_shows_every_state_of_a_process() -> None:
    alarms = ProcessAlarms()
    for alarm in ProcessAlarm:
        alarms.watch(alarm, lambda: ["one", "two"])
    assert [each.name for each in alarms.raised()] == [name for name in sorted(ProcessAlarm) for _ in range(2)]
    (family,) = alarms.collect()
    assert {sample.labels["alarm"]: sample.value for sample in family.samples} == dict.fromkeys(ProcessAlarm, 2)


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda alarm: alarm.name)
def test_every_alarm_says_what_to_do_and_has_its_page(alarm: Alarm) -> None:
    assert all((alarm.meaning, alarm.stopped, alarm.action))
    assert not alarm.action.startswith("The same")
    assert "…" not in alarm.title
    assert (ROOT / "docs" / "runbook" / f"{alarm.runbook}.md").is_file()
    page = Renderer("1.0").runbook(alarm.name)
    assert page is not None
    assert "`" not in page
    assert "](" not in page


def test_the_address_of_a_page_is_relative() -> None:
    assert runbook_of("copy-lag") == "/runbook/copy-lag"
    assert runbook_of("metadata-not-followed") == "/runbook/metadata"
    assert runbook_of("a/b?c") == "/runbook/a%2Fb%3Fc"


def test_the_metrics_of_the_page_exist() -> None:
    exposed = {spec.exposed_name for spec in all_metrics()}
    assert set(re.findall(r"`(tidegate_\w+)`", reference())) <= exposed
