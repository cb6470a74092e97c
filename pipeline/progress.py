"""How far a Spark job is: asked of Spark's status tracker, shown on standard error.

Where somebody watches it is a bar; in a file it is a line when a tenth more is done, so that a night's log stays short.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from pyspark import SparkContext

from tiers.console import progress_bar

POLL_MS = 200


@contextmanager
def job_progress(context: SparkContext, group: str, what: str, tasks: int | None) -> Iterator[None]:
    """Watches the jobs of `group`, which run in this block. `tasks` None: Spark makes them as it goes."""
    ended = threading.Event()

    def watch() -> None:
        told = 0
        shown = 0
        with progress_bar(what, tasks) as advance:
            while not ended.wait(POLL_MS / 1000):
                done = _completed_tasks(context, group)
                done = done if tasks is None else min(tasks, done)
                advance(done - shown)
                shown = done
                if tasks is not None and done * 10 // max(tasks, 1) > told:
                    told = done * 10 // tasks
                    _say_in_a_file(f"{what}: {done} of {tasks} tasks")

    watcher = threading.Thread(target=watch, name="tidegate-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _completed_tasks(context: SparkContext, group: str) -> int:
    tracker = context.statusTracker()
    done = 0
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in [] if job is None else job.stageIds:
            stage = tracker.getStageInfo(stage_id)
            done += 0 if stage is None else stage.numCompletedTasks
    return done


def _say_in_a_file(line: str) -> None:
    if not typer.get_text_stream("stderr").isatty():
        typer.echo(line, err=True)
