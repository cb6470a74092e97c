"""A trouble that lasts is logged when it begins, at growing intervals, and when it ends."""

from __future__ import annotations

import logging

import pytest

from tiers.lasting_trouble import LONGEST_INTERVAL_MS, LastingTrouble

logger = logging.getLogger(__name__)


class Clock:
    now_ms = 5_000


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, object, object]]:
    found = [
        (each.levelname, each.message, getattr(each, "since_s", None), getattr(each, "times", None))
        for each in caplog.records
    ]
    caplog.clear()
    return found


@pytest.fixture
def trouble(caplog: pytest.LogCaptureFixture) -> LastingTrouble:
    caplog.set_level("INFO")
    Clock.now_ms = 5_000
    return LastingTrouble(logger, "it fails", "it works again", clock_ms=lambda: Clock.now_ms)


def test_the_begin_and_the_end_are_logged(trouble: LastingTrouble, caplog: pytest.LogCaptureFixture) -> None:
    trouble.ended()
    trouble.found(error="refused")
    assert caplog.records[0].__dict__["error"] == "refused"
    trouble.found()
    Clock.now_ms += 2_000
    trouble.ended()
    trouble.ended()
    assert lines(caplog) == [("WARNING", "it fails", None, None), ("INFO", "it works again", 2, 2)]


def test_the_lines_come_at_growing_intervals(trouble: LastingTrouble, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(151):
        trouble.found()
        Clock.now_ms += 1_000
    assert [since for _, _, since, _ in lines(caplog)] == [None, 10, 30, 70, 150]
    for _ in range(10):
        Clock.now_ms += LONGEST_INTERVAL_MS
        trouble.found()
    assert len(lines(caplog)) == 10


def test_the_next_trouble_begins_anew(trouble: LastingTrouble, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(40):
        trouble.found()
        Clock.now_ms += 1_000
    trouble.ended()
    lines(caplog)
    for _ in range(11):
        trouble.found()
        Clock.now_ms += 1_000
    assert [since for _, _, since, _ in lines(caplog)] == [None, 10]
