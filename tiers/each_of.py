"""`each_of`: the same work for each of many items, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sized
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


async def each_of(
    items: Iterable[S], work: Callable[[S], Awaitable[T]], at_once: int, done: Callable[[], None] = lambda: None
) -> list[T]:
    """In the order of `items`, at most `at_once` at a time. The first failure ends all, and comes out alone.

    An item is taken when its turn has come: of a million, no more are held than are worked on."""
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
