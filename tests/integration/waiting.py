"""Waiting for what no server announces."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Asks again and again; fails when it does not hold within `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
