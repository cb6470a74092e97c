"""Sends errors that no code handles to the log. Each kind has some lines per minute, as events of connections have.

Python itself writes them to standard error as several lines without the form of the log, and a client may decide how
often: a TLS handshake with a host name outside of ASCII is such an error. A crash of the interpreter is left to
`PYTHONFAULTHANDLER`, since nothing can be logged after it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from proxy.wire.connection_log import ConnectionLog
from tiers.broker.client import monotonic_ms

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

logger = logging.getLogger(__name__)

LOGGERS = (__name__, "asyncio", "py.warnings")
"""asyncio logs what its exception handler gets, also that of uvloop."""


@contextmanager
def unhandled_errors_logged(clock_ms: Callable[[], int] = monotonic_ms) -> Iterator[None]:
    """Inside of it, unraisable errors, the ends of threads, warnings and errors of the event loop go to the log."""
    lines = ConnectionLog(logger, clock_ms)

    def is_kept(record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        fields = lines.fields_of_next(f"{record.name} {record.levelname} {kind}", {})
        if fields:
            vars(record).update(fields)
        return fields is not None

    limited = [logging.getLogger(name) for name in LOGGERS]
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = _log_unraisable, _log_thread
    logging.captureWarnings(True)
    for each in limited:
        each.addFilter(is_kept)
    try:
        yield
    finally:
        for each in limited:
            each.removeFilter(is_kept)
        logging.captureWarnings(False)
        sys.unraisablehook, threading.excepthook = hooks


def _log_unraisable(unraisable: UnraisableHookArgs) -> None:
    if unraisable.exc_type is UnicodeDecodeError and isinstance(unraisable.object, bytes):
        # CPython decodes the name before it calls `sni_callback`, and then ends the handshake.
        logger.warning("a client named a host outside of ASCII in its TLS handshake")
        return
    error = unraisable.exc_type, unraisable.exc_value or unraisable.exc_type(), unraisable.exc_traceback
    # The object may be half destroyed, so its text is not asked for.
    where = getattr(unraisable.object, "__qualname__", type(unraisable.object).__qualname__)
    logger.error("no code handles an error: %s", where, exc_info=error)


def _log_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit:
        return
    error = ended.exc_type, ended.exc_value or ended.exc_type(), ended.exc_traceback
    logger.error("an error ended a thread: %s", "" if ended.thread is None else ended.thread.name, exc_info=error)
