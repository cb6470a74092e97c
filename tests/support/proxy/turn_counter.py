"""Counts in which turn of the event loop pieces of work happen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from protocol.steps import Steps


class TurnCounter:
    """`notes` has the number of pieces of work by turn."""

    def __init__(self) -> None:
        self.turn = 0
        self.notes: Counter[int] = Counter()

    def note(self) -> None:
        self.notes[self.turn] += 1

    def noted(self, steps: Callable[..., Steps[Any]]) -> Callable[..., Steps[Any]]:
        """Returns a function that does the same, and notes each step."""

        def noting(*arguments: Any, **more: Any) -> Steps[Any]:
            walk = steps(*arguments, **more)
            while True:
                try:
                    next(walk)
                except StopIteration as end:
                    return end.value
                self.note()
                yield

        return noting


@asynccontextmanager
async def counted_turns() -> AsyncIterator[TurnCounter]:
    counter = TurnCounter()

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            counter.turn += 1

    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count())
        yield counter
        counting.cancel()
