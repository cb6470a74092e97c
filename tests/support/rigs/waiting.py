"""Waits for conditions that no server announces."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 300.0


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Checks the condition repeatedly. Fails if it does not hold in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
