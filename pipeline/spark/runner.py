"""`SparkRunner`: runs the tasks of a job on the executors of a Spark session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from pipeline.spark.job import new_group, run_tasks
from pipeline.worker import worker
from tiers.access.progress import SILENCE, Progress
from tiers.upkeep.runner import Task

P = TypeVar("P")
R = TypeVar("R")

_CANCEL_AGAIN_S: Final = 1.0


class SparkRunner:
    def __init__(self, session: SparkSession, progress: Progress = SILENCE) -> None:
        self._session = session
        self._progress = progress

    @property
    def parallelism(self) -> int:
        return self._session.sparkContext.defaultParallelism

    @property
    def is_speculative(self) -> bool:
        return str(self._session.sparkContext.getConf().get("spark.speculation")).lower() == "true"

    async def run(self, what: str, plan: Sequence[P], task: Task[P, R]) -> list[R]:
        """Runs one Spark task per row, on a thread: Spark blocks, and a member of the group must send heartbeats."""
        group = new_group()
        run = partial(run_tasks, self._session, what, plan, partial(_run, task), group, self._progress)
        running = asyncio.get_running_loop().run_in_executor(None, run)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(Py4JError, AttributeError):  # Spark has ended, and its tasks with it
                    self._session.sparkContext.cancelJobGroup(group)
                # Repeated, because a job that had not started was not cancelled.
                await asyncio.wait({running}, timeout=_CANCEL_AGAIN_S)
            running.exception()  # marks the exception as retrieved: the caller raises CancelledError instead
            raise


def _run(task: Task[P, R], row: P) -> R:
    return worker().run(task(row))
