"""A virtual event loop: it never waits, so a simulated hour takes as long as its callbacks do.

* When no callback is ready, the clock jumps to the next timer. When there is no timer either, nothing can ever happen
  again: `DeadlockError`.
* Every callback belongs to the process whose context it carries (`current_process`), or to the world around the
  processes. The callbacks of a dead process never run: a crash leaves no `finally` behind. Those of a paused process
  wait until it goes on.
* Calls in threads run in the loop, after a virtual latency, and in order if the executor has one thread.
* Task hashes count up, so that the order of a set of tasks is the same in every run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

START_S = 1_000.0


class DeadlockError(Exception):
    """Nothing is ready, and no timer is set."""


class LoopProcess(Protocol):
    """What the loop must know of a process."""

    is_dead: bool
    is_paused: bool
    backlog: deque[Any]
    """The callbacks that wait until a paused process goes on."""
    graveyard: list[object]
    """The callbacks of a dead process. They are kept, since their coroutines would run `finally` when collected."""

    def blocking_call(self, executor: object, work: Callable[[], Any]) -> Any:
        """Does work of a thread of the process."""

    def thread_latency_s(self) -> float: ...


current_process: ContextVar[LoopProcess | None] = ContextVar("current_process", default=None)
_numbers = count()


class NumberedTask(asyncio.Task[Any]):
    def __init__(
        self,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        loop: asyncio.AbstractEventLoop,
        context: Context | None = None,
    ) -> None:
        self._number = next(_numbers)
        super().__init__(coro, loop=loop, context=context)
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._number


class _Callback(list[Any]):
    """A callback that waits for its turn, with the interface of `asyncio.TimerHandle` that asyncio itself uses.

    It is a list, since lists are made and compared quickly: when, number, work, arguments, context. Timers are in the
    order of the first two."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2], self[3] = None, ()

    def cancelled(self) -> bool:
        return self[2] is None


def _make_task(loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None) -> NumberedTask:
    return NumberedTask(coro, loop=loop, context=context)


class VirtualLoop(asyncio.BaseEventLoop):
    _ready: deque[Any]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S
        self.now_ns = int(START_S * 1e9)
        self.world = copy_context()
        """The context of the world around the processes."""
        self.callbacks_run = 0
        self._timers: list[_Callback] = []
        self._timer_numbers = count()
        self._thread_free_s: dict[int, float] = {}
        self.set_task_factory(_make_task)
        self.defect: BaseException | None = None
        """The first exception of a callback of the simulation itself."""
        self.set_exception_handler(lambda loop, context: None)
        # A future is made for every wait, so its loop answers by calls of C functions.
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]
        self.get_debug = bool  # type: ignore[method-assign]  # it returns False

    def time(self) -> float:
        return self.now_s

    @property
    def now_ms(self) -> int:
        return int(self.now_s * 1000 + 1e-4)

    def _process_events(self, event_list: Any) -> None:
        return

    def _write_to_self(self) -> None:
        return

    def later(self, delay_s: float, work: Callable[..., object], *arguments: Any) -> _Callback:
        """Calls `work` in the world after the delay, whatever happens to the process that asked for it."""
        made = _Callback((self.now_s + delay_s, next(self._timer_numbers), work, arguments, self.world))
        heappush(self._timers, made)
        return made

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        """asyncio calls it to close an asynchronous generator whose reader ended early. There are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        made = _Callback((0.0, 0, callback, args, copy_context() if context is None else context))
        self._ready.append(made)
        return made

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        made = _Callback(
            (when, next(self._timer_numbers), callback, args, copy_context() if context is None else context)
        )
        heappush(self._timers, made)
        return made

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Runs callbacks until the loop is stopped."""
        timers, ready = self._timers, self._ready
        while True:
            while timers and timers[0][2] is None:
                heappop(timers)
            if not ready and not self._stopping:
                if not timers:
                    raise DeadlockError(f"nothing can happen any more at {self.now_s:.3f} s")
                self.now_s = max(self.now_s, timers[0][0])
                self.now_ns = int(self.now_s * 1e9)
            end_s = self.now_s + 1e-7
            while timers and timers[0][0] < end_s:
                timer = heappop(timers)
                if timer[2] is not None:
                    ready.append(timer)
            for _ in range(len(ready)):
                self._run(ready.popleft())
            if self._stopping:
                return

    def _run(self, one: _Callback) -> None:
        _, _, work, arguments, context = one
        if work is None:
            return
        process = context.get(current_process)
        if process is not None:
            if process.is_dead:
                process.graveyard.append(one)
                return
            if process.is_paused:
                process.backlog.append(one)
                return
        self.callbacks_run += 1
        try:
            context.run(work, *arguments)
        except Exception as error:
            self.defect = self.defect or error

    def close(self) -> None:
        """Forgets everything that was still to come."""
        self._timers.clear()
        self._thread_free_s.clear()
        super().close()

    def go_on(self, process: LoopProcess) -> None:
        """Lets a paused process go on: everything that became due meanwhile runs now."""
        process.is_paused = False
        self._ready.extend(process.backlog)
        process.backlog.clear()

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        process = current_process.get()

        def run() -> None:
            try:
                answer = func(*args) if process is None else process.blocking_call(executor, lambda: func(*args))
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(answer)

        at_s = self.now_s + (0 if process is None else process.thread_latency_s())
        if isinstance(executor, ThreadPoolExecutor) and executor._max_workers == 1:
            at_s = max(at_s, self._thread_free_s.get(id(executor), 0) + 1e-6)
            self._thread_free_s[id(executor)] = at_s
        self.call_at(at_s, run)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return

    def run_virtual(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs the work in the world. What is still going on afterwards stops as it is."""
        return self.run_until_complete(work)
