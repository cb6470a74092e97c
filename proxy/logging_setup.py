"""Sets up logging: one line per event, as text or as JSON. The message says what happened; the keys name the objects.

The key `event` has the name of the event, and `runbook` the page of an alarm (proxy/log_events.py).

The log never has data that a client sent, names excepted, or that a store holds. It never has a setting that may be a
secret. A client chooses the names that it sends, in up to 32 KiB each. So every text is cut, and its control characters
are escaped, so that no text begins a line of its own.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from proxy.log_events import fields_of

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NOISY: Final = ("kafka", "aiobotocore", "botocore", "aiohttp", "urllib3", "asyncio")

MAX_CHARACTERS: Final = 1_000
"""The longest message, and the longest value of a key."""
MAX_TRACEBACK_CHARACTERS: Final = 16_000


def loggable(text: str, max_characters: int = MAX_CHARACTERS, also: str = "") -> str:
    """Returns a text of limited length that is one line, apart from the control characters `also`."""
    cut = text[:max_characters]
    shown = "".join(each if each.isprintable() or each in also else ascii(each)[1:-1] for each in cut)
    return shown if len(text) <= max_characters else f"{shown}..."


def set_up_logging(level: str, form: str, stream: TextIO | None = None) -> None:
    """`form` is "text" or "json"."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.getLogger().handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def own_fields(record: logging.LogRecord) -> dict[str, object]:
    """Returns what a line is about."""
    return {
        key: value if isinstance(value, int | float) else loggable(str(value))
        for key, value in vars(record).items()
        if key not in _STANDARD and value is not None
    }


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {**fields_of(record), **own_fields(record)}


class _Formatter(logging.Formatter):
    def formatException(self, ei: Any) -> str:  # the name is that of the standard library
        return loggable(super().formatException(ei), MAX_TRACEBACK_CHARACTERS, "\n")


class TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {loggable(record.getMessage())}{extra}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": loggable(record.getMessage()),
            **_extra(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)
