"""`while_active` ends a call that moves too little for a while, however long the whole call takes.

A total deadline would demand a rate: 30 s for 30 parts of 16 MiB at once demand 17 MB/s, and below that every upload
would fail for ever. So a call ends when it made no progress for the time of its deadline. A few bytes are no progress
(`PIECE_BYTES`): a peer that sends one byte in each deadline would occupy its place for years.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar

PIECE_BYTES = 512 << 10
"""The bytes of a body that count as progress, and of an upload that are sent at once. The last ones may be fewer."""

_enclosing: ContextVar[Activity | None] = ContextVar("enclosing_activity", default=None)


def note_progress() -> None:
    """Notes progress of the innermost call that the context of this code is in, from any thread."""
    activity = _enclosing.get()
    if activity is not None:
        activity.moved_elsewhere()


class Activity:
    """One call in progress. It passes its progress on to the call that encloses it, if there is one.

    Progress only moves the deadline. The timer looks at it when it fires, since a download notes progress thousands of
    times for each time that its deadline matters."""

    def __init__(self, timeout_s: float | None, on_moved: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._began_s = self._loop.time()
        self._ends_s = self._began_s + (timeout_s or 0)
        self._ending = asyncio.timeout(None)
        self._timer = None if timeout_s is None else self._loop.call_at(self._ends_s, self._look)
        self._on_moved = on_moved
        self._outer = _enclosing.get()
        self._is_over = False

    def moved(self) -> None:
        """Notes progress: the deadline begins anew."""
        self._extend(0)

    def handed_over(self) -> None:
        """Notes that the last byte was handed over to the network, which may still hold all of them in its buffers.

        At the same rate, they leave the buffers in the time in which they entered. So the answer may take that longer.
        """
        self._extend(self._loop.time() - self._began_s)

    def moved_elsewhere(self, *, is_last: bool = False) -> None:
        """As `moved`, from any thread; `is_last`: as `handed_over`."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.handed_over if is_last else self.moved)

    def _extend(self, more_s: float) -> None:
        if self._is_over:
            return
        if self._timeout_s is not None:
            self._ends_s = max(self._ends_s, self._loop.time() + self._timeout_s + more_s)
        if self._on_moved is not None:
            self._on_moved()
        if self._outer is not None:
            self._outer._extend(more_s)

    def _look(self) -> None:
        if self._loop.time() < self._ends_s:
            self._timer = self._loop.call_at(self._ends_s, self._look)
        else:
            self._ending.reschedule(self._ends_s)

    def _end(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()


@asynccontextmanager
async def while_active(timeout_s: float | None, on_moved: Callable[[], None] | None = None) -> AsyncIterator[Activity]:
    """Raises `TimeoutError` when the body noted no progress for `timeout_s`; None sets no deadline.

    `on_moved` is called on the event loop for each progress, also of the calls inside."""
    activity = Activity(timeout_s, on_moved)
    token = _enclosing.set(activity)
    try:
        async with activity._ending:
            yield activity
    finally:
        activity._end()
        _enclosing.reset(token)
