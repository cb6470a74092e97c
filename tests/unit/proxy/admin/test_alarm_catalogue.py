"""The alarms in words are those of docs/alarms.md."""

from __future__ import annotations

from proxy.admin.alarm_catalogue import ALARMS, runbook_of
from tests.support.repository import ROOT


def test_the_page_knows_every_alarm_with_a_metric() -> None:
    text = (ROOT / "docs" / "alarms.md").read_text()
    reasons, others = text.split("## Other metrics")
    rows = [line for part in (reasons, others.split("## Lines without a metric")[0]) for line in part.splitlines()]
    assert {line.split("`")[1] for line in rows if line.startswith("| `")} == set(ALARMS)


def test_every_alarm_says_what_to_do() -> None:
    for name, alarm in ALARMS.items():
        assert all(alarm), name
        assert not alarm.action.startswith("The same"), name


def test_the_address_of_a_runbook_page_is_relative() -> None:
    assert runbook_of("copy-lag") == "/runbook/copy-lag"
    assert runbook_of("a/b?c") == "/runbook/a%2Fb%3Fc"
