"""`LastingTrouble`: logs a trouble that repeats when it begins, at growing intervals, and when it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

FIRST_INTERVAL_MS: Final = 10_000
LONGEST_INTERVAL_MS: Final = 600_000


class LastingTrouble:
    """One kind of trouble, such as unreachable brokers, which a loop finds again in every attempt.

    `begins` and `ends` are the messages. A repeated message has the fields `times`, the number of attempts so far, and
    `since_s`. The message at the end has the level INFO."""

    def __init__(
        self,
        logger: logging.Logger,
        begins: str,
        ends: str,
        *,
        clock_ms: Callable[[], int],
        level: int = logging.WARNING,
    ) -> None:
        self._logger = logger
        self._begins = begins
        self._ends = ends
        self._clock_ms = clock_ms
        self._level = level
        self._times = 0
        self._began_at_ms = 0
        self._again_at_ms = 0
        self._interval_ms = FIRST_INTERVAL_MS

    def found(self, **fields: object) -> None:
        """The trouble is there. `fields` go to the log line, if there is one."""
        now_ms = self._clock_ms()
        self._times += 1
        if self._times == 1:
            self._began_at_ms, self._interval_ms = now_ms, FIRST_INTERVAL_MS
            self._logger.log(self._level, self._begins, extra=fields)
        elif now_ms < self._again_at_ms:
            return
        else:
            self._logger.log(self._level, self._begins, extra={**fields, **self._lasting(now_ms)})
            self._interval_ms = min(2 * self._interval_ms, LONGEST_INTERVAL_MS)
        self._again_at_ms = now_ms + self._interval_ms

    def ended(self) -> None:
        """The trouble is not there. Does nothing if it was not there before."""
        if self._times:
            self._logger.info(self._ends, extra=self._lasting(self._clock_ms()))
            self._times = 0

    def _lasting(self, now_ms: int) -> dict[str, object]:
        return {"since_s": round((now_ms - self._began_at_ms) / 1000), "times": self._times}
