"""Does the same work for each of many items: several at a time, one after the other whatever fails, or in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sized
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


async def bounded_gather(
    items: Iterable[S], work: Callable[[S], Awaitable[T]], at_once: int, done: Callable[[], None] = lambda: None
) -> list[T]:
    """Calls `work` for each item, at most `at_once` at a time. Returns the results in the order of `items`.

    The first failure cancels all other calls, and is raised alone. A call that was cancelled by itself counts as a
    failure: a group of tasks would take it for one without a result. It takes an item from `items` only when a call can
    start, so it never holds more items than calls."""
    results: dict[int, T] = {}
    waiting = enumerate(items)
    begun = 0

    async def take() -> None:
        nonlocal begun
        for place, item in waiting:
            begun += 1
            results[place] = await work(item)
            done()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(items)) if isinstance(items, Sized) else at_once):
                group.create_task(take())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    if len(results) < begun:
        raise asyncio.CancelledError
    return [results[place] for place in range(len(results))]


async def each_alone(items: Iterable[S], work: Callable[[S], Awaitable[T]], troubles: list[Exception]) -> list[T]:
    """Calls `work` for one item after the other, and adds what fails to `troubles`. Returns the other results."""
    results: list[T] = []
    for item in items:
        try:
            results.append(await work(item))
        except Exception as error:  # a failure of one item ends no other work
            troubles.append(error)
    return results


async def in_turns(items: Iterable[S], per_turn: int) -> AsyncIterator[S]:
    """Yields the items, and lets the event loop do other work after each `per_turn` of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % per_turn == 0:
            await asyncio.sleep(0)


async def in_order(calls: Iterable[tuple[int, Callable[[], Awaitable[T]]]], at_once: int) -> AsyncGenerator[T]:
    """Yields the results of `calls` in order. Each call has a weight.

    The weights of the calls in progress, and of the results that wait for their turn, add up to `at_once` at most. A
    call that is heavier runs alone. A failure is raised in its place, and ends the iteration."""
    running: deque[tuple[int, asyncio.Future[T]]] = deque()
    waiting = iter(calls)
    following = next(waiting, None)
    try:
        while running or following is not None:
            while following is not None and (not running or sum(one for one, _ in running) + following[0] <= at_once):
                weight, call = following
                future = asyncio.ensure_future(call())  # noqa: TID251  # a TaskGroup must not span a yield
                running.append((weight, future))
                following = next(waiting, None)
            yield await running.popleft()[1]
    finally:
        for _, each in running:
            each.cancel()
        if running:
            await asyncio.wait([each for _, each in running])
        for _, each in running:
            if not each.cancelled():
                each.exception()  # marks the exception as retrieved: the caller has stopped reading
