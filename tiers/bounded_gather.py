"""`bounded_gather` does the same work for each of many items, with bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sized
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
