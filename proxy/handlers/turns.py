"""Bounds the work for one message in one turn of the event loop, so that one client's message holds up no other client.

A message is worked on in slices of `SLICE_STEPS` steps, each a millisecond or two. The first slice comes at once: most
messages need no other. The slices after it wait for their turns in the order of arrival, whichever message they belong
to. One of them has its turn in one turn of the loop, however many messages wait.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from protocol.steps import Steps, Walk
from proxy.wire.exchange import Answer, Buffers, Forward, Prepare, Respond

SLICE_STEPS: Final = 512
SLICE_ITEMS: Final = 64
"""The look-ups for an item take about ten times as long as a step of decoding."""

STEPS_OF_A_LOOK_UP: Final = (None,) * 8
"""What a look-up in the metadata, or the start of a read, takes of a slice: `yield from STEPS_OF_A_LOOK_UP`."""

T = TypeVar("T")
R = TypeVar("R")
Decision = tuple[Answer | Forward, Respond | None]


class _Turns:
    """The slices that wait for their turns on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._new_turn = loop.create_future
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        turn = self._new_turn()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            self._call_soon(self._let_one_go_on)
        await turn

    def _let_one_go_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise its client has left
                turn.set_result(None)
                break
        if self._waiting:
            self._call_soon(self._let_one_go_on)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


async def next_turn() -> None:
    """Waits until the caller may do the next slice of its work."""
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = _Turns(loop)
    await turns.next()


async def in_turns(steps: Steps[T]) -> T:
    """Takes all steps, in slices. Returns their result."""
    walk = Walk(steps)
    return walk.result if walk.go_on(SLICE_STEPS) else await go_on(walk)


def patch_in_turns(steps: Steps[Buffers]) -> Buffers | Coroutine[None, None, Buffers]:
    """Returns the response that the steps make, or a coroutine that returns it if they take more than a slice."""
    walk = Walk(steps)
    return walk.result if walk.go_on(SLICE_STEPS) else go_on(walk)


def patched_by(steps: Callable[[memoryview], Steps[Buffers]]) -> Respond:
    """Returns what lets the steps of a response make the client's."""
    return lambda response: patch_in_turns(steps(response))


async def go_on(walk: Walk[T]) -> T:
    """Takes the rest of the steps, in slices. Returns their result."""
    try:
        is_done = walk.is_done
        while not is_done:
            await next_turn()
            is_done = walk.go_on(SLICE_STEPS)
        return walk.result
    finally:
        walk.close()


def decide_in_turns(steps: Steps[Decision]) -> tuple[Answer | Forward | Prepare, Respond | None]:
    """Returns what a handler decides about a request. If that takes more than a slice, it decides later."""
    walk = Walk(steps)
    if walk.go_on(SLICE_STEPS):
        return walk.result
    return decided_later(lambda: go_on(walk))


def decided_later(decide: Callable[[], Coroutine[None, None, Decision]]) -> tuple[Prepare, Respond]:
    """Returns what `decide` will decide about a request. Later requests wait meanwhile."""
    decided: Respond | None = None

    async def prepare() -> Answer | Forward:
        nonlocal decided
        action, decided = await decide()
        return action

    def respond(response: memoryview) -> Buffers | Coroutine[None, None, Buffers]:
        return (response,) if decided is None else decided(response)

    return Prepare(prepare), respond


async def slices_of(items: Sequence[T], slice_items: int = SLICE_STEPS) -> AsyncIterator[Sequence[T]]:
    """Yields the items, `slice_items` at a time. Others have their turns in between."""
    for start in range(0, len(items), slice_items):
        if start:
            await next_turn()
        yield items[start : start + slice_items]


async def in_slices(
    items: Sequence[T], work: Callable[[T], Coroutine[None, None, R]], within_ms: float = math.inf
) -> list[R]:
    """Returns the results of `work` for all items. It runs for `SLICE_ITEMS` at a time; the loop turns in between.

    After `within_ms` no slice begins, and the remaining items have no result. Without this limit, the timeouts of the
    slices add up: a request of many items would occupy its connection, and delay a stop, for hours."""
    clock_s = asyncio.get_running_loop().time
    until_s = clock_s() + within_ms / 1000
    results: list[R] = []
    async for part in slices_of(items, SLICE_ITEMS):
        if clock_s() >= until_s:
            break
        results += await asyncio.gather(*map(work, part))
    return results
