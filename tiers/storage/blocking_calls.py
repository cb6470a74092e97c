"""`BlockingCalls`: the calls of a library that blocks, each under a deadline, in a bounded number of threads.

* A call that passes its deadline, or whose caller is cancelled, is abandoned: its thread cannot be stopped. Another
  takes its place, so that a store which answered nothing for a while can be used again at once; only when
  `MAX_ABANDONED` per place are stuck do new calls wait for them.
* What an abandoned call returns or raises is forgotten. `Abandoned` tells the call itself, so that it can take back
  what it has begun.
* Threads are daemons: a peer that never answers does not hold up the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_ABANDONED = 4


class Abandoned(Exception):
    """Raised within a call that nobody waits for any more."""


class Call(Generic[T]):
    """What the work is told about its caller."""

    def __init__(self, work: Callable[[Call[T]], T], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.is_abandoned = False

    def check(self) -> None:
        """Raises `Abandoned`. To be asked before whatever others would see."""
        if self.is_abandoned:
            raise Abandoned


class BlockingCalls:
    """Used on one loop. `threads` calls run at the same time; the others wait within their own deadlines."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._free = asyncio.Semaphore(threads)
        self._may_abandon = threads * MAX_ABANDONED
        self._abandoned = 0
        self._idle: list[queue.SimpleQueue[Call[object] | None]] = []
        self._is_closed = False

    @property
    def abandoned(self) -> int:
        """Threads that are stuck in calls that nobody waits for."""
        return self._abandoned

    async def run(self, work: Callable[[Call[T]], T], timeout_s: float | None) -> T:
        """Raises `TimeoutError` at the deadline, waiting for a thread included."""
        async with asyncio.timeout(timeout_s):
            await self._free.acquire()
            if self._is_closed:
                self._free.release()
                raise RuntimeError(f"{self._name} is closed")
            call = Call(work, asyncio.get_running_loop())
            inbox = self._idle.pop() if self._idle else self._start()
            inbox.put(call)  # type: ignore[arg-type]  # a queue of calls of every kind
            try:
                return await asyncio.shield(call.future)
            except BaseException:
                if not call.future.done():
                    self._abandon(call)
                raise

    def close(self) -> None:
        """Idle threads end now, the others with their call."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _abandon(self, call: Call[T]) -> None:
        call.is_abandoned = True
        self._abandoned += 1
        if self._abandoned <= self._may_abandon:
            self._free.release()
        call.future.add_done_callback(_forget)

    def _start(self) -> queue.SimpleQueue[Call[object] | None]:
        inbox: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        return inbox

    def _serve(self, inbox: queue.SimpleQueue[Call[object] | None]) -> None:
        while (call := inbox.get()) is not None:
            result, error = None, None
            try:
                call.check()
                result = call.work(call)
            except BaseException as raised:  # a Rust library's panic is a BaseException, and must not end the thread
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                call.loop.call_soon_threadsafe(self._ended, call, inbox, result, error)
            # Or the last result would live for as long as the thread is idle.
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
            self._free.release()
            if self._is_closed:
                inbox.put(None)
            else:
                self._idle.append(inbox)
        if error is None:
            call.future.set_result(result)
        elif isinstance(error, Exception):
            call.future.set_exception(error)
        else:
            call.future.set_exception(_Panic(error))


class _Panic(RuntimeError):
    """A BaseException of a library, which would end the loop if it were raised there."""


def _forget(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()
