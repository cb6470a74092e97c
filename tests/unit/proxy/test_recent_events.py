"""The last lines of the log with the level ERROR, for the page."""

from __future__ import annotations

import io
import logging
from functools import partial

from proxy.log_events import ALARMS
from proxy.process.admin.recent_events import KEPT_OF_EACH, MAX_EVENTS, RecentEvents
from proxy.process.child import _name

log = logging.getLogger("tidegate.test")


def test_an_event_has_its_name_and_what_it_is_about() -> None:
    kept = RecentEvents()
    with kept.attached():
        log.error("a stage of a partition keeps failing", extra={"partition": "orders-0", "stage": "copy"})
        log.warning("a stage of a partition failed", extra={"partition": "orders-0"})
        log.error("the listener for broker %d cannot be opened: %s", 7, "in use\n", extra={"port": 9})
        log.error("a line of a library")
    log.error("nothing was deleted")
    newest, oldest = kept.events()
    assert (newest.runbook, newest.detail) == ("listener-not-open", "port 9")
    assert newest.message == "the listener for broker 7 cannot be opened: in use\\n"
    assert (oldest.runbook, oldest.detail) == ("stage-failing", "partition orders-0, stage copy")


def test_an_event_of_a_child_does_not_repeat_the_name_of_the_child() -> None:
    root, handler = logging.getLogger(), logging.StreamHandler(io.StringIO())
    handler.addFilter(partial(_name, "worker-1"))
    root.addHandler(handler)
    kept = RecentEvents()
    try:
        with kept.attached():
            log.error("a stage of a partition keeps failing", extra={"partition": "orders-0"})
    finally:
        root.removeHandler(handler)
    assert kept not in root.handlers
    (event,) = kept.events()
    assert event.detail == "partition orders-0"


def test_an_event_that_repeats_pushes_no_other_one_out() -> None:
    kept = RecentEvents()
    with kept.attached():
        log.error("the broker removed records before they were copied")
        for _ in range(1_000):
            log.error("a bound between the tiers does not hold")
    events = [each.runbook for each in kept.events()]
    assert sorted(events) == ["bounds-violation"] * KEPT_OF_EACH + ["gap"]


def test_the_number_of_events_has_a_bound() -> None:
    kept = RecentEvents()
    with kept.attached():
        for said in (*ALARMS, *ALARMS):
            log.error(said)
    assert len(kept.events()) == MAX_EVENTS
