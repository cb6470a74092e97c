"""Bounds the work for one message in one turn of the event loop, so that one client's message holds up no other client.

The event loop decodes messages of up to `LOOP_BYTES`, which takes milliseconds for the smallest items. A thread decodes
larger ones. There is one thread for all of them: several would share the interpreter with the event loop, and slow it
down. The work that follows for each item is done in slices.

The thread decodes in a fair order (`FairOrder`). A connection has at most two messages there at a time, because it
prepares one request and completes one response. So many connections with large messages delay a small message by at
most one message in progress and by its own share of the thread.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from proxy.handlers.fair_order import FairOrder
from proxy.wire.exchange import Answer, Buffers, Forward, HandlerState, Prepare

LOOP_BYTES: Final = 4 * 1024
SLICE_ITEMS: Final = 512

T = TypeVar("T")
R = TypeVar("R")
Decision = tuple[Answer | Forward, HandlerState | None]


class Decoder:
    """The thread that decodes large messages."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        self._lock = threading.Lock()
        self._order: FairOrder[Callable[[], bool]] = FairOrder()

    async def run(self, size_bytes: int, decode: Callable[[], T]) -> T:
        """Returns `decode()`. If the caller is cancelled before its turn, nothing is decoded or kept."""
        done: Future[T] = Future()
        work: list[Callable[[], T]] = [decode]
        done.add_done_callback(lambda _: work.clear())

        def turn() -> bool:
            if not done.set_running_or_notify_cancel():
                return False
            try:
                done.set_result(work[0]())
            except BaseException as error:  # the caller raises it
                done.set_exception(error)
            return True

        with self._lock:
            self._order.add(size_bytes, turn)
        self._thread.submit(self._next)
        return await asyncio.wrap_future(done)

    def _next(self) -> None:
        with self._lock:
            size_bytes, turn = self._order.take()
        if turn():
            with self._lock:
                self._order.decoded(size_bytes)


_decoder = Decoder()


async def off_loop(size_bytes: int, decode: Callable[[], T]) -> T:
    """Returns `decode()`. It runs in the thread if the message is large, so it must not change shared state."""
    if size_bytes <= LOOP_BYTES:
        return decode()
    return await _decoder.run(size_bytes, decode)


async def off_loop_in_slices(size_bytes: int, items: Sequence[T], work: Callable[[Sequence[T]], list[R]]) -> list[R]:
    """Returns the results of `work` for all items of a message, in order. It runs for `SLICE_ITEMS` at a time.

    Between two slices, the thread decodes the other messages whose turn it is."""
    results: list[R] = []
    async for part in slices_of(items):
        results += await off_loop(size_bytes * len(part) // len(items), partial(work, part))
    return results


def decide_when_decoded(
    size_bytes: int, decode: Callable[[], T], decide: Callable[[T], Decision]
) -> tuple[Answer | Forward | Prepare, HandlerState | None]:
    """Returns what a handler decides about a request. If the request is large, it decides when the thread has decoded.

    `decode` must not change shared state. `decide` runs on the event loop."""
    if size_bytes <= LOOP_BYTES:
        return decide(decode())

    async def decide_later() -> Decision:
        return decide(await off_loop(size_bytes, decode))

    return decided_later(decide_later)


def decided_later(decide: Callable[[], Coroutine[None, None, Decision]]) -> tuple[Prepare, HandlerState]:
    """Returns the action and the state of a request about which `decide` will decide. Later requests wait meanwhile."""
    later = _DecidedLater()

    async def prepare() -> Answer | Forward:
        action, later.state = await decide()
        return action

    return Prepare(prepare), later


class _DecidedLater:
    """The state of a request that is decided about later. `state` is None if the response goes on as it is."""

    state: HandlerState | None = None

    def on_response(self, response: memoryview) -> Buffers | Coroutine[None, None, Buffers]:
        return (response,) if self.state is None else self.state.on_response(response)

    def on_abandoned(self) -> None:
        if self.state is not None:
            self.state.on_abandoned()


async def slices_of(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """Yields the items, `SLICE_ITEMS` at a time. The loop turns in between."""
    for start in range(0, len(items), SLICE_ITEMS):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + SLICE_ITEMS]


async def in_slices(
    items: Sequence[T], work: Callable[[T], Coroutine[None, None, R]], within_ms: float = math.inf
) -> list[R]:
    """Returns the results of `work` for all items. It runs for `SLICE_ITEMS` at a time; the loop turns in between.

    After `within_ms` no slice begins, and the remaining items have no result. Without this limit, the timeouts of the
    slices add up: a request of many items would occupy its connection, and delay a stop, for hours."""
    clock_s = asyncio.get_running_loop().time
    until_s = clock_s() + within_ms / 1000
    results: list[R] = []
    async for part in slices_of(items):
        if clock_s() >= until_s:
            break
        results += await asyncio.gather(*map(work, part))
    return results
