"""Counts in which turn of the event loop pieces of work happen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TurnCounter:
    """`notes` has the number of pieces of work by turn."""

    def __init__(self) -> None:
        self.turn = 0
        self.notes: Counter[int] = Counter()

    def note(self) -> None:
        self.notes[self.turn] += 1


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
