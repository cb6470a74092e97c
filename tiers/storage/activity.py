"""`while_active` ends a call that moves too little for a while, however long the whole call takes.

A total deadline would demand a rate: 30 s for 30 parts of 16 MiB at once demand 17 MB/s, and below that every upload
would fail for ever. So a call ends when it made no progress for the time of its deadline. A few bytes are no progress
(`PIECE_BYTES`): a peer that sends one byte in each deadline would occupy its place for years.

`BlockingCalls` runs the calls of a blocking library, each with a deadline, in a bounded number of threads.

* A call ends when it makes no progress for the time of its deadline. The work in the thread tells of
  its progress by `note_progress`. A call that waits for a thread makes progress when a call with a thread makes some,
  or ends.
* If a call passes its deadline or its caller is cancelled, the call is abandoned, because its thread cannot be stopped.
  Another thread takes its place, so a store that recovers can be used again at once. New calls wait for abandoned ones
  only when `MAX_ABANDONED` times the number of threads hang.
* The result or the error of an abandoned call is dropped. `Call.check` raises `Abandoned` in the call itself, so that
  the call can undo what it has begun.
* The threads are daemons, so a peer that never answers does not delay the end of the process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Generic, TypeVar

T = TypeVar("T")

PIECE_BYTES = 512 << 10
"""The bytes of a body that count as progress, and of an upload that are sent at once. The last ones may be fewer."""
MAX_ABANDONED = 4

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


class Abandoned(Exception):
    """Raised in a call whose caller no longer waits for it."""


class CallsClosedError(RuntimeError):
    """An error about a call that had not begun when `BlockingCalls` was closed."""


class Call(Generic[T]):
    """One call. The work receives it, to ask whether the caller still waits."""

    def __init__(self, work: Callable[[Call[T]], T]) -> None:
        self.work = work
        self.context = copy_context()
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.is_abandoned = False

    def check(self) -> None:
        """Raises `Abandoned` when the caller no longer waits. Call it before each step that others can see."""
        if self.is_abandoned:
            raise Abandoned


class BlockingCalls:
    """Runs at most `threads` calls at a time; the others wait within their deadlines. It belongs to one event loop."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._free = asyncio.Semaphore(threads)
        self._may_abandon = threads * MAX_ABANDONED
        self._abandoned = 0
        self._waiting: set[Activity] = set()
        self._idle: list[queue.SimpleQueue[Call[object] | None]] = []
        self._is_closed = False

    @property
    def abandoned(self) -> int:
        """The number of threads that hang in abandoned calls."""
        return self._abandoned

    async def run(self, work: Callable[[Call[T]], T], timeout_s: float | None) -> T:
        """Returns the result of `work` or raises its error.

        Raises `TimeoutError` after `timeout_s` without progress; None sets no deadline. Raises `CallsClosedError` after
        `close`.
        """
        has_thread = False

        def moved() -> None:
            if has_thread:
                self._move_waiting()

        async with while_active(timeout_s, moved) as activity:
            self._waiting.add(activity)
            try:
                await self._free.acquire()
            finally:
                self._waiting.discard(activity)
            activity.moved()
            has_thread = True
            if self._is_closed:
                self._free.release()
                raise CallsClosedError(f"{self._name} is closed")
            call = Call(work)
            inbox = self._idle.pop() if self._idle else self._start()
            inbox.put(call)  # type: ignore[arg-type]  # a queue of calls of every kind
            try:
                return await asyncio.shield(call.future)
            except BaseException:
                if not call.future.done():
                    self._abandon(call)
                raise

    def close(self) -> None:
        """Ends the idle threads now, and each other thread after its call."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _move_waiting(self) -> None:
        for activity in self._waiting:
            activity.moved()

    def _abandon(self, call: Call[T]) -> None:
        call.is_abandoned = True
        self._abandoned += 1
        if self._abandoned <= self._may_abandon:
            self._free.release()
        call.future.add_done_callback(lambda future: future.cancelled() or future.exception())  # no caller asks for it

    def _start(self) -> queue.SimpleQueue[Call[object] | None]:
        inbox: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        return inbox

    def _serve(self, inbox: queue.SimpleQueue[Call[object] | None]) -> None:
        while (call := inbox.get()) is not None:
            result, error = None, None
            try:
                call.check()
                result = call.context.run(call.work, call)
            except BaseException as raised:  # a panic of a Rust library is a BaseException and must not end the thread
                error = raised
            try:
                call.future.get_loop().call_soon_threadsafe(self._ended, call, inbox, result, error)
            except RuntimeError:  # the loop is closed: `_ended`, which would end this thread, cannot run any more
                return
            # Without this, an idle thread would keep its last result alive.
            del call, result, error

    def _ended(
        self,
        call: Call[object],
        inbox: queue.SimpleQueue[Call[object] | None],
        result: object,
        error: BaseException | None,
    ) -> None:
        if call.is_abandoned:
            if self._abandoned > self._may_abandon:
                self._free.release()
            self._abandoned -= 1
            inbox.put(None)
        else:
            self._move_waiting()
            self._free.release()
            if self._is_closed:
                inbox.put(None)
            else:
                self._idle.append(inbox)
        if error is None:
            call.future.set_result(result)
        else:
            # A BaseException of a library would end the event loop if it were raised there.
            call.future.set_exception(error if isinstance(error, Exception) else _Panic(error))


class _Panic(RuntimeError):
    """Wraps a BaseException of a library."""
