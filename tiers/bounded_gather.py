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

    The first failure cancels all other calls, and is raised alone. It takes an item from `items` only when a call can
    start, so it never holds more items than calls."""
    results: dict[int, T] = {}
    waiting = enumerate(items)

    async def take() -> None:
        for place, item in waiting:
            results[place] = await work(item)
            done()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(items)) if isinstance(items, Sized) else at_once):
                group.create_task(take())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [results[place] for place in range(len(results))]
