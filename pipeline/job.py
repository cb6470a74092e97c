"""`run_tasks`: a plan's rows go out to the executors, a result row comes back for each. Record bytes never do.

A task that fails for a reason of its own segment says so in its result; one that raises ends the whole run, so it does
that only for what no other row could do better: no right to read, no store. An executor that dies is replaced by Spark,
which gives its rows to another one: `attempt` tells a task that it may not be the first.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext, TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pipeline.progress import job_progress
from pipeline.task_call import TaskCall
from tiers.console import TRY_AGAIN
from tiers.errors import RetriableRemoteStorageError

P = TypeVar("P")
R = TypeVar("R")

LOST_GRACE_S: Final = 3.0
"""Longer than Spark takes to end what it gave up (`spark.python.task.killTimeout`). What still writes after it, on a
machine that was cut off, leaves objects that no record names any more: `tier orphans` finds them."""

_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+Error: )")


class JobError(Exception):
    """The run ended; the message is for the user, one line."""


def new_group() -> str:
    """By which what runs can be cancelled."""
    return f"tidegate-{uuid.uuid4()}"


def run_tasks(
    session: SparkSession, what: str, plan: Sequence[P], task: Callable[[P], R], group: str | None = None
) -> list[R]:
    """One Spark task per row; results in the plan's order. Rows that take less than a second are better packed.

    Raises `JobError`."""
    if not plan:
        return []
    try:
        with one_job(session, what, len(plan), group) as context:
            return context.parallelize(plan, len(plan)).map(TaskCall(task)).collect()
    except (Py4JJavaError, PySparkException) as error:
        raise JobError(f"{what}: {spark_cause(error)}") from error


@contextmanager
def one_job(session: SparkSession, what: str, tasks: int | None, group: str | None = None) -> Iterator[SparkContext]:
    """How far Spark is with what runs in the block is shown; an interrupt cancels it. `tasks` None: Spark decides."""
    context = session.sparkContext
    group = group or new_group()
    context.setJobGroup(group, what, interruptOnCancel=True)
    try:
        with job_progress(context, group, what, tasks):
            yield context
    except KeyboardInterrupt:
        context.cancelJobGroup(group)
        raise
    finally:
        context.setLocalProperty("spark.jobGroup.id", "")


def attempt() -> int:
    """How often Spark has begun this task before: 0 the first time, and outside Spark."""
    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def spark_cause(error: Exception) -> str:
    """One line: the last of the Python traceback that is in it, without Spark's wrapping; else Spark's own first."""
    text = str(error.java_exception.getMessage()) if isinstance(error, Py4JJavaError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if "Error: " in line and not line.startswith(("at ", "File ", "org.apache"))]
    said = own[-1] if own else next(iter(lines), type(error).__name__)
    said = _MODULE.sub("", said)
    return f"{said}: {TRY_AGAIN}" if said.startswith(RetriableRemoteStorageError.__name__) else said
