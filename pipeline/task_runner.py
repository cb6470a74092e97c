"""`TaskRunner`: where a job's tasks run: on Spark, or in this process alone, where there is no more to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar, runtime_checkable

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from pipeline.job import new_group, run_tasks

P = TypeVar("P")
R = TypeVar("R")


class TaskRunner(Protocol):
    @property
    def parallelism(self) -> int:
        """How many tasks run at a time."""

    def run(self, what: str, plan: Sequence[P], task: Callable[[P], R]) -> list[R]:
        """Results in the plan's order; blocks."""


@runtime_checkable
class Cancellable(Protocol):
    """A runner whose tasks go on elsewhere though nobody waits for them."""

    def cancel(self) -> None:
        """Ends what another thread runs now; its `run` then raises."""


class SparkRunner:
    """Raises `JobError`."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._group = ""

    @property
    def parallelism(self) -> int:
        return self._session.sparkContext.defaultParallelism

    def run(self, what: str, plan: Sequence[P], task: Callable[[P], R]) -> list[R]:
        self._group = new_group()
        return run_tasks(self._session, what, plan, task, self._group)

    def cancel(self) -> None:
        with suppress(Py4JError, AttributeError):  # Spark has ended, and all that runs with it
            self._session.sparkContext.cancelJobGroup(self._group)
