"""`TaskRunner`: where a job's tasks run: on Spark, or in this process alone, where there is no more to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pyspark.sql import SparkSession

from pipeline.job import run_tasks

P = TypeVar("P")
R = TypeVar("R")


class TaskRunner(Protocol):
    @property
    def parallelism(self) -> int:
        """How many tasks run at a time."""

    def run(self, what: str, plan: Sequence[P], task: Callable[[P], R]) -> list[R]:
        """Results in the plan's order; blocks."""


class SparkRunner:
    """Raises `JobError`."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    @property
    def parallelism(self) -> int:
        return self._session.sparkContext.defaultParallelism

    def run(self, what: str, plan: Sequence[P], task: Callable[[P], R]) -> list[R]:
        return run_tasks(self._session, what, plan, task)
