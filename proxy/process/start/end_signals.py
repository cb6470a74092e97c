"""SIGTERM and SIGINT, which end a process from its first import on: they wait until its event loop handles them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def is_asked_to_end() -> bool:
    """Whether one of the signals waits for `set_by_end_signals`. `proxy.__main__` lets them wait."""
    return not signal.sigpending().isdisjoint(END_SIGNALS)


@contextmanager
def set_by_end_signals(stop: asyncio.Event, numbers: Sequence[signal.Signals] = END_SIGNALS) -> Iterator[None]:
    """Lets the signals set `stop`, also those that wait. Afterwards they wait again, so the exit code stays."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    held = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for number in numbers:
            loop.remove_signal_handler(number)
