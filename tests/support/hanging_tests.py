"""A pytest plugin that replaces how pytest-timeout ends a test that hangs: uvloop ignores what a signal handler raises.

A hanging test in an event loop fails because its tasks are cancelled. It fails at the place where it hangs, and the
stacks of its tasks are in its output.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import pytest

AGAIN_S = 20
"""The time between two attempts to end a test."""


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
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True
