"""`run_tasks`: sends a plan's rows to the executors and collects one result row for each.

The rules of `tiers.upkeep.runner` hold. When an executor dies, Spark gives its rows to another executor. `attempt`
tells a task whether it may be a repetition.
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

from pipeline.spark.progress import job_progress
from pipeline.spark.task_call import TaskCall
from tiers.access.progress import SILENCE, Progress
from tiers.errors import TRY_AGAIN, RetriableRemoteStorageError
from tiers.upkeep.runner import JobError

P = TypeVar("P")
R = TypeVar("R")

LOST_GRACE_S: Final = 3.0
"""How long to wait until tasks that Spark gave up no longer write; longer than `spark.python.task.killTimeout`. A task
on a machine that was cut off may write even later. Its objects are orphans, and `tier orphans` finds them."""

_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+Error: )")


def new_group() -> str:
    """Returns a new Spark job group id, by which running jobs can be cancelled."""
    return f"tidegate-{uuid.uuid4()}"


def run_tasks(
    session: SparkSession,
    what: str,
    plan: Sequence[P],
    task: Callable[[P], R],
    group: str | None = None,
    progress: Progress = SILENCE,
) -> list[R]:
    """Runs one Spark task per row and returns the results in the plan's order.

    Pack rows that take less than a second into larger ones. Raises `JobError`."""
    if not plan:
        return []
    try:
        with one_job(session, what, len(plan), group, progress) as context:
            return context.parallelize(plan, len(plan)).map(TaskCall(task)).collect()
    except (Py4JJavaError, PySparkException) as error:
        raise JobError(f"{what}: {spark_cause(error)}") from error


@contextmanager
def one_job(
    session: SparkSession, what: str, tasks: int | None, group: str | None = None, progress: Progress = SILENCE
) -> Iterator[SparkContext]:
    """Shows the progress of the Spark jobs that run in the block, and cancels them on an interrupt.

    If `tasks` is None, Spark decides how many tasks there are."""
    context = session.sparkContext
    group = group or new_group()
    context.setJobGroup(group, what, interruptOnCancel=True)
    try:
        with job_progress(context, group, what, tasks, progress):
            yield context
    except KeyboardInterrupt:
        context.cancelJobGroup(group)
        raise
    finally:
        context.setLocalProperty("spark.jobGroup.id", "")


def attempt() -> int:
    """Returns how often Spark has started this task before: 0 for the first attempt and outside Spark."""
    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def spark_cause(error: Exception) -> str:
    """Returns the cause in one line: the last error of an embedded Python traceback, else the first line of Spark's
    message."""
    text = str(error.java_exception.getMessage()) if isinstance(error, Py4JJavaError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if "Error: " in line and not line.startswith(("at ", "File ", "org.apache"))]
    said = own[-1] if own else next(iter(lines), type(error).__name__)
    said = _MODULE.sub("", said)
    return f"{said}: {TRY_AGAIN}" if said.startswith(RetriableRemoteStorageError.__name__) else said
