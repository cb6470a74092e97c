"""A trouble that lasts is logged when it begins, at growing intervals, and when it ends."""

from __future__ import annotations

import logging

import pytest

from tiers.lasting_trouble import LONGEST_INTERVAL_MS, LastingTrouble

logger = logging.getLogger(__name__)


def test_the_lines_come_at_growing_intervals_and_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now_ms = 5_000
    trouble = LastingTrouble(logger, "it fails", "it works again", clock_ms=lambda: now_ms)
    trouble.ended()
    for _ in range(2):
        for _ in range(151):
            trouble.found(error="refused")
            now_ms += 1_000
        for _ in range(3):
            now_ms += LONGEST_INTERVAL_MS
            trouble.found(error="refused")
        trouble.ended()
        trouble.ended()
        found = [(each.levelname, each.message, each.__dict__.get("since_s")) for each in caplog.records]
        since = [None, 10, 30, 70, 150, 751, 1351, 1951]
        assert found == [*[("WARNING", "it fails", each) for each in since], ("INFO", "it works again", 1951)]
        assert (caplog.records[0].__dict__["error"], caplog.records[-1].__dict__["times"]) == ("refused", 154)
        caplog.clear()
