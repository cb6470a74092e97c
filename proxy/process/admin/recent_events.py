"""`RecentEvents`: the last lines of the log with the level ERROR, for the page."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from proxy.admin.facts import EventLine
from proxy.log_events import page_of, phrase
from proxy.logging_setup import loggable, own_fields

KEPT_OF_EACH: Final = 3
"""The lines that are kept of each event, so that one that repeats pushes no other one out."""
MAX_EVENTS: Final = 20


class RecentEvents(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._lines: dict[str, deque[tuple[float, EventLine]]] = {}
        """By phrase: the lines, each with its time in seconds."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Takes the lines of all loggers until the context exits.

        It takes them before the handlers of the log, which add the name of the process. The page has that name anyway.
        """
        root = logging.getLogger()
        root.handlers.insert(0, self)
        try:
            yield
        finally:
            root.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        page = page_of(record)
        if page is None:
            return  # a line of a library
        detail = ", ".join(f"{key} {value}" for key, value in own_fields(record).items())
        line = EventLine(int(record.created * 1000), page, loggable(record.getMessage()), detail)
        kept = self._lines.setdefault(phrase(str(record.msg)), deque(maxlen=KEPT_OF_EACH))
        kept.append((record.created, line))

    def events(self) -> tuple[EventLine, ...]:
        """Returns the last lines, the newest first. Other threads may log meanwhile."""
        assert self.lock is not None
        with self.lock:
            lines = [line for kept in self._lines.values() for line in kept]
        lines.sort(key=lambda each: -each[0])
        return tuple(line for _, line in lines[:MAX_EVENTS])
