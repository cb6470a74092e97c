"""`job_progress`: reports the progress of a Spark job, as Spark's status tracker has it, to a `Progress`.

The progress is a bar, and one milestone for each tenth of the tasks, so that the log of a long run stays short. Spark
waits forever for a cluster without a free executor and logs nothing; a message says so then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext

from tiers.access.progress import Progress

POLL_MS = 200
STALLED_POLLS = 150
_NOT_STARTED = "no task has started for {} s: does the cluster have a free executor that is large enough?"


@contextmanager
def job_progress(context: SparkContext, group: str, what: str, tasks: int | None, progress: Progress) -> Iterator[None]:
    """Shows the progress of the jobs of `group`, which run in this block. If `tasks` is None, the number of tasks is
    not known in advance."""
    ended = threading.Event()

    def watch() -> None:
        told = shown = polls = 0
        has_started = False
        with progress.bar(what, tasks) as advance:
            while not ended.wait(POLL_MS / 1000):
                try:
                    done, active = _counted_tasks(context, group)
                except Exception:  # Spark or its JVM ended; the caller that waits for the job reports that
                    return
                has_started = has_started or done + active > 0
                polls += 1
                if polls == STALLED_POLLS and not has_started:
                    progress.say(f"{what}: {_NOT_STARTED.format(POLL_MS * STALLED_POLLS // 1000)}")
                done = done if tasks is None else min(tasks, done)
                advance(done - shown)
                shown = done
                if tasks is not None and done * 10 // max(tasks, 1) > told:
                    told = done * 10 // tasks
                    progress.milestone(f"{what}: {done} of {tasks} tasks")

    watcher = threading.Thread(target=watch, name="tidegate-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _counted_tasks(context: SparkContext, group: str) -> tuple[int, int]:
    """Returns the numbers of completed and of running tasks."""
    tracker = context.statusTracker()
    done = active = 0
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in [] if job is None else job.stageIds:
            stage = tracker.getStageInfo(stage_id)
            done += 0 if stage is None else stage.numCompletedTasks
            active += 0 if stage is None else stage.numActiveTasks
    return done, active
