"""The driver's and the executors' side of a job on Spark: results, progress, messages and temporary files."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline.spark import progress
from pipeline.spark.job import attempt, run_tasks
from pipeline.spark.progress import job_progress
from pipeline.spark.runner import SparkRunner
from pipeline.spark.scratch import scratch_folder
from pipeline.spark.spark_noise import without_noise
from tests.support.tiers.recorded_progress import RecordedProgress
from tiers.upkeep.runner import JobError


class Tracker:
    """Spark's: each time it is asked, one more of `completed`."""

    def __init__(self, completed: list[int], active: int = 0) -> None:
        self._completed = completed
        self.active = active
        self.is_at_end = threading.Event()

    def statusTracker(self) -> Tracker:
        return self

    def getJobIdsForGroup(self, group: str) -> list[int]:
        if len(self._completed) == 1:
            self.is_at_end.set()
        return [1]

    def getJobInfo(self, job_id: int) -> object:
        return SimpleNamespace(stageIds=[7])

    def getStageInfo(self, stage_id: int) -> object:
        completed = self._completed.pop(0) if len(self._completed) > 1 else self._completed[0]
        return SimpleNamespace(numCompletedTasks=completed, numActiveTasks=self.active)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> RecordedProgress:
    monkeypatch.setattr(progress, "POLL_MS", 1)
    return RecordedProgress()


def watch(tracker: Any, tasks: int | None, shown: RecordedProgress) -> None:
    with job_progress(tracker, "group", "reading", tasks, shown):
        assert tracker.is_at_end.wait(300)


def test_a_line_for_every_tenth_that_is_done(shown: RecordedProgress) -> None:
    watch(Tracker([0, 1, 3, 19, 21]), 20, shown)
    assert shown.milestones[:2] == ["reading: 3 of 20 tasks", "reading: 19 of 20 tasks"]
    assert shown.bars == [("reading", 20)]
    assert sum(shown.advances) <= 20  # what a retried stage did twice is not more than all


def test_a_spark_that_is_gone_is_left_for_the_job_to_tell(
    shown: RecordedProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker([5])
    monkeypatch.setattr(tracker, "getJobInfo", None)
    watch(tracker, 20, shown)
    assert (shown.advances, shown.milestones, shown.said) == ([], [], [])


def test_where_spark_decides_how_many_tasks_there_are_it_only_counts(shown: RecordedProgress) -> None:
    watch(Tracker([0, 5, 300]), None, shown)
    assert shown.advances[:2] == [0, 5]
    assert (shown.milestones, shown.said) == ([], [])


@pytest.mark.parametrize(
    ("completed", "active", "is_stalled"), [([0] * 10, 0, True), ([0] * 10, 1, False), ([0, 1] + [0] * 8, 0, False)]
)
def test_a_cluster_without_executors_is_reported_in_a_line(
    completed: list[int], active: int, is_stalled: bool, shown: RecordedProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "STALLED_POLLS", 5)
    watch(Tracker(completed, active), None, shown)
    assert [said.startswith("reading: no task has started for 0 s") for said in shown.said] == [True] * is_stalled


DAEMON = b'  File "/python/lib/pyspark.zip/pyspark/daemon.py", line 264, in manager\n'
WORKER = b'  File "/python/lib/pyspark.zip/pyspark/daemon.py", line 95, in worker\n'
TRACEBACK = b"Traceback (most recent call last):\n"
BROKEN = b"BrokenPipeError: [Errno 32] Broken pipe\n"


def test_the_start_messages_of_a_jvm_are_dropped() -> None:
    lines = [
        b"WARNING: Using incubator modules: jdk.incubator.vector\n",
        b"Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties\n",
        b"26/11/22 01:04:18 WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address\n",
        b"26/11/22 01:04:20 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform...\n",
        b'Setting Spark log level to "FATAL".\n',
        b"JAVA_HOME is not set\n",
        b"26/11/22 01:04:20 WARN Utils: Service 'sparkDriver' could not bind on port 0\n",
    ]
    assert list(without_noise(lines)) == lines[-2:]


def test_mixed_lines_of_ended_spark_processes_are_dropped() -> None:
    lines = [TRACEBACK, TRACEBACK, DAEMON, WORKER, BROKEN, DAEMON, WORKER, BROKEN, b"import failed\n"]
    assert list(without_noise(lines)) == [b"import failed\n"]


def test_a_traceback_of_a_job_stays_a_broken_pipe_included() -> None:
    lines = [TRACEBACK, b'  File "/job.py", line 3, in task\n', b"    pipe.write(row)\n", BROKEN]
    assert list(without_noise(lines)) == lines


@pytest.mark.parametrize("folders", ["{spark}", "/no/such/folder,{spark}"])
def test_it_is_where_spark_removes_what_a_dead_executor_leaves(
    folders: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", folders.format(spark=tmp_path))
    with scratch_folder("merge") as folder:
        assert folder.parent == tmp_path
        (folder / "segment").write_bytes(b"records")
    assert list(tmp_path.iterdir()) == []


def test_without_spark_it_is_where_temporary_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    with scratch_folder("merge") as folder:
        assert folder.parent == Path(tempfile.gettempdir())


def squared(number: int) -> tuple[int, int]:
    return number * number, attempt()


def refused(number: int) -> int:
    raise PermissionError(f"no right to read segment {number}")


async def never(row: str) -> None:
    raise AssertionError(row)


def test_results_come_in_the_order_of_the_plan(spark: SparkSession) -> None:
    assert run_tasks(spark, "squaring", range(5), squared) == [(0, 0), (1, 0), (4, 0), (9, 0), (16, 0)]
    assert run_tasks(spark, "squaring", [], squared) == []


def test_an_error_of_a_task_is_one_line(spark: SparkSession) -> None:
    with pytest.raises(JobError) as failed:
        run_tasks(spark, "reading", [7], refused)
    assert str(failed.value) == "reading: PermissionError: no right to read segment 7"


async def test_an_interrupted_run_returns_when_its_tasks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark does not cancel a job that has not begun."""
    began, ended, cancels = threading.Event(), threading.Event(), list[str]()

    def endless(*_: object) -> None:
        began.set()
        assert ended.wait(300)
        raise JobError("cancelled")

    def cancel(group: str) -> None:
        cancels.append(group)
        if len(cancels) > 1:
            ended.set()

    monkeypatch.setattr("pipeline.spark.runner._CANCEL_AGAIN_S", 0)
    monkeypatch.setattr("pipeline.spark.runner.run_tasks", endless)
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(cancelJobGroup=cancel))
    running = asyncio.create_task(SparkRunner(session).run("merging", ["began"], never))
    await asyncio.to_thread(began.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    assert len(set(cancels)) == 1
