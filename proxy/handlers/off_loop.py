"""Bounds the work for one message in one turn of the event loop, so that one client's message holds up no other client.

The event loop decodes messages of up to `LOOP_BYTES`, which takes milliseconds for the smallest items. A thread decodes
larger ones. There is one thread for all of them: several would share the interpreter with the event loop, and slow it
down. The work that follows for each item is done in slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from proxy.wire.exchange import Buffers, Forward, HandlerState, Prepare

LOOP_BYTES: Final = 4 * 1024
SLICE_ITEMS: Final = 512

_decoder = ThreadPoolExecutor(1, thread_name_prefix="decoder")

T = TypeVar("T")
R = TypeVar("R")
Decision = tuple[Forward, HandlerState | None]


async def off_loop(size_bytes: int, decode: Callable[[], T]) -> T:
    """Returns `decode()`. It runs in the thread if the message is large, so it must not change shared state."""
    if size_bytes <= LOOP_BYTES:
        return decode()
    return await asyncio.get_running_loop().run_in_executor(_decoder, decode)


def decide_when_decoded(
    size_bytes: int, decode: Callable[[], T], decide: Callable[[T], Decision]
) -> tuple[Forward | Prepare, HandlerState | None]:
    """Returns what a handler decides about a request. If the request is large, it decides when the thread has decoded.

    `decode` must not change shared state. `decide` runs on the event loop."""
    if size_bytes <= LOOP_BYTES:
        return decide(decode())
    later = _DecidedLater()

    async def prepare() -> Forward:
        forward, later.state = decide(await off_loop(size_bytes, decode))
        return forward

    return Prepare(prepare), later


class _DecidedLater:
    """The state of a request that is decided about later. `state` is None if the response goes on as it is."""

    state: HandlerState | None = None

    def on_response(self, response: memoryview) -> Buffers | Coroutine[None, None, Buffers]:
        return (response,) if self.state is None else self.state.on_response(response)

    def on_abandoned(self) -> None:
        if self.state is not None:
            self.state.on_abandoned()


async def in_slices(items: Sequence[T], work: Callable[[T], Coroutine[None, None, R]]) -> list[R]:
    """Returns the results of `work` for all items. It runs for `SLICE_ITEMS` at a time; the loop turns in between."""
    results: list[R] = []
    for start in range(0, len(items), SLICE_ITEMS):
        if start:
            await asyncio.sleep(0)
        results += await asyncio.gather(*map(work, items[start : start + SLICE_ITEMS]))
    return results
