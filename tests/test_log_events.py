"""Every line of the log has an event, and every line of an alarm names its runbook page."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

from proxy.log_events import event_of
from proxy.logging_setup import set_up_logging
from tests.support.log_lines import all_phrases


def test_every_line_has_an_event_of_its_own() -> None:
    events = {said: event_of(said) for said in all_phrases()}
    assert len(set(events.values())) == len(events)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", event) for event in events.values())


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_has_its_event_and_an_alarm_its_page(form: str) -> None:
    stream = io.StringIO()
    set_up_logging("info", form, stream)
    log = logging.getLogger("tiers.test")
    log.error("the listener for broker %d cannot be opened: %s", 7, "in use")
    log.info("serving %s:%d", "localhost", 9092)
    logging.getLogger("kafka.test").warning("a line of a library")
    log.warning("a stage of a partition failed")
    if form == "json":
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [(line.get("event"), line.get("runbook")) for line in lines] == [
            ("the-listener-for-broker-cannot-be-opened", "docs/runbook/listener-not-open.md"),
            ("serving", None),
            (None, None),
            ("a-stage-of-a-partition-failed", None),
        ]
    else:
        first, second, third, fourth = stream.getvalue().splitlines()
        event = "event=the-listener-for-broker-cannot-be-opened"
        assert first.endswith(f" {event} runbook=docs/runbook/listener-not-open.md")
        assert second.endswith("serving localhost:9092 event=serving")
        assert "event=" not in third
        assert "runbook=" not in fourth
