"""A pytest plugin that replaces how pytest-timeout ends a test that hangs: uvloop ignores what a signal handler raises.

A hanging test in an event loop fails because its tasks are cancelled. It fails at the place where it hangs, and the
stacks of its tasks are in its output. If a call blocks the event loop, the process ends, and writes the stacks of its
threads to `STACKS`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from typing import Any, TextIO

import pytest

AGAIN_S = 20
"""The time between two attempts to end a test."""

ATTEMPTS = 6
"""The process ends after so many attempts."""

STACKS = pytest.StashKey[TextIO]()
"""The file for the stacks, in the stash of pytest's configuration. The default is the standard error."""


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Sets a timer whose signal comes again and again, since a task may hang in its clean-up too."""

    def end(_number: int, _frame: object) -> None:
        message = f"The test ran for longer than {settings.timeout:.0f} s."
        if (loop := asyncio._get_running_loop()) is None:
            pytest.fail(message)
        print(message)
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=sys.stdout)
            loop.call_soon_threadsafe(task.cancel, message)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    file = item.config.stash.get(STACKS, sys.stderr)
    # Between two signals: a dump while a handler runs may crash.
    faulthandler.dump_traceback_later(settings.timeout + (ATTEMPTS - 0.5) * AGAIN_S, exit=True, file=file)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True
