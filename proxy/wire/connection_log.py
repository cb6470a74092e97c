"""`ConnectionLog`: logs the connections that the proxy refuses or closes, with a bound on the number of lines.

A hostile client decides how often this happens. So each reason has some lines per minute. The next line of the reason
says how many were left out, and the metrics count all of them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LINES = 20
WINDOW_MS = 60_000


@dataclass(slots=True)
class _Window:
    began_at_ms: int
    lines: int = 0
    left_out: int = 0


class ConnectionLog:
    def __init__(self, logger: logging.Logger, clock_ms: Callable[[], int]) -> None:
        self._logger = logger
        self._clock_ms = clock_ms
        self._windows = defaultdict[str, _Window](lambda: _Window(clock_ms()))

    def log(self, level: int, reason: str, message: str, who: Mapping[str, object]) -> bool:
        """Returns whether the line was not left out.

        `reason` is one of few. `message` says what happened, and `who` names the connection."""
        fields = self.fields_of_next(reason, who)
        if fields is None:
            return False
        self._logger.log(level, message, extra=fields)
        return True

    def fields_of_next(self, reason: str, who: Mapping[str, object]) -> Mapping[str, object] | None:
        """Counts a line of this reason, and returns its fields. None: the line must be left out."""
        window = self._windows[reason]
        now_ms = self._clock_ms()
        if now_ms - window.began_at_ms >= WINDOW_MS:
            window.began_at_ms, window.lines = now_ms, 0
        if window.lines >= LINES:
            window.left_out += 1
            return None
        window.lines += 1
        left_out, window.left_out = window.left_out, 0
        return {**who, "lines_left_out": left_out} if left_out else who
