"""A SIGTERM that waits, as one that came while the program was imported."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting_sigterm() -> Iterator[None]:
    """Sends SIGTERM to this thread, which holds it. What nobody has taken at the end is dropped."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.raise_signal(signal.SIGTERM)
    try:
        yield
    finally:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        signal.signal(signal.SIGTERM, before)
