"""`TaskRunner`: runs a job's tasks, on Spark or in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar, runtime_checkable

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from pipeline.spark.job import new_group, run_tasks
from tiers.access.progress import SILENCE, Progress

P = TypeVar("P")
R = TypeVar("R")


class TaskRunner(Protocol):
    @property
    def parallelism(self) -> int:
        """The number of tasks that run at the same time."""

    def run(self, what: str, plan: Sequence[P], task: Callable[[P], R]) -> list[R]:
        """Runs `task` for each row of `plan` and returns the results in the plan's order. The call blocks."""


@runtime_checkable
class Cancellable(Protocol):
    """A runner whose tasks run in other processes and continue when the caller stops waiting."""

    def cancel(self) -> None:
        """Ends the tasks of a `run` call on another thread. That call then raises."""


class SparkRunner:
    """Runs tasks as Spark jobs. `run` raises `JobError`."""

    def __init__(self, session: SparkSession, progress: Progress = SILENCE) -> None:
        self._session = session
        self._progress = progress
        self._group = ""

    @property
    def parallelism(self) -> int:
        return self._session.sparkContext.defaultParallelism

    def run(self, what: str, plan: Sequence[P], task: Callable[[P], R]) -> list[R]:
        self._group = new_group()
        return run_tasks(self._session, what, plan, task, self._group, self._progress)

    def cancel(self) -> None:
        with suppress(Py4JError, AttributeError):  # Spark has ended, and its tasks with it
            self._session.sparkContext.cancelJobGroup(self._group)
