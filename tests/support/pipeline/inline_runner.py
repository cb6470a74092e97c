"""`InlineRunner`: runs the tasks of a job in this process, on its worker's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipeline.worker import worker
from tiers.upkeep.runner import Task

P = TypeVar("P")
R = TypeVar("R")


class InlineRunner:
    """`before` is called before the tasks of each run, on their thread."""

    is_speculative = False

    def __init__(self, parallelism: int = 2) -> None:
        self.parallelism = parallelism
        self.before: Callable[[str], None] = lambda what: None

    async def run(self, what: str, plan: Sequence[P], task: Task[P, R]) -> list[R]:
        def run_all() -> list[R]:
            self.before(what)
            return [worker().run(task(row)) for row in plan]

        return await asyncio.to_thread(run_all)
