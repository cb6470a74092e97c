"""Every line of the log has an event with a stable name, and every line of an alarm names its runbook page."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

from proxy.commands.log_reference import reference
from proxy.log_events import ALARMS, EVENTS, OTHER_EVENTS, SHARED_PAGES, page_of, runbook_of
from proxy.logging_setup import set_up_logging
from tests.support.log_lines import all_phrases, all_texts
from tests.support.repository import ROOT
from tiers.tasks.alarms import AlarmReason


def test_every_line_has_an_event() -> None:
    assert all_phrases() - EVENTS.keys() == set()


def test_every_event_is_in_the_code() -> None:
    """Some messages are made of parts: of a metadata manager that is opened, and of a connection."""
    made = {said for said in EVENTS if said.startswith("the remote log metadata ") and "open" in said}
    assert EVENTS.keys() - all_phrases() - all_texts() == made


def test_a_phrase_is_an_alarm_or_another_event() -> None:
    assert ALARMS.keys() & OTHER_EVENTS.keys() == set()
    assert set(ALARMS.values()) & set(OTHER_EVENTS.values()) == set()


def test_the_names_are_stable_words() -> None:
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", event) for event in EVENTS.values())
    assert len(set(OTHER_EVENTS.values())) == len(OTHER_EVENTS)


def test_the_alarms_of_a_partition_have_the_names_of_their_reasons() -> None:
    assert set(AlarmReason) <= set(ALARMS.values())


def test_every_alarm_has_a_page_and_every_shared_page_has_alarms() -> None:
    for alarm in ALARMS.values():
        assert (ROOT / runbook_of(alarm)).is_file()
    assert {alarm for alarms in SHARED_PAGES.values() for alarm in alarms} <= set(ALARMS.values())
    assert set(SHARED_PAGES) <= {page_of(alarm) for alarm in ALARMS.values()}


def test_the_page_of_the_log_is_generated() -> None:
    assert (ROOT / "docs" / "log.md").read_text() == reference(), "python -m proxy.commands.log_reference > docs/log.md"


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_has_its_event_and_an_alarm_its_page(form: str) -> None:
    stream = io.StringIO()
    set_up_logging("info", form, stream)
    log = logging.getLogger("tidegate.test")
    log.error("the listener for broker %d cannot be opened: %s", 7, "in use")
    log.info("serving %s:%d", "localhost", 9092)
    log.warning("a line of a library")
    log.warning("a stage of a partition failed")
    if form == "json":
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [(line.get("event"), line.get("runbook")) for line in lines] == [
            ("listener-not-open", "docs/runbook/listener-not-open.md"),
            ("serving", None),
            (None, None),
            ("stage-failed", None),
        ]
    else:
        first, second, third, fourth = stream.getvalue().splitlines()
        assert first.endswith(" event=listener-not-open runbook=docs/runbook/listener-not-open.md")
        assert second.endswith("serving localhost:9092 event=serving")
        assert "event=" not in third
        assert "runbook=" not in fourth
