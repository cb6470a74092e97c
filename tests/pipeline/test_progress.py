"""What is told of a running job, with Spark's tracker played by a list of what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.spark import progress
from pipeline.spark.progress import job_progress


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
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    advances: list[int] = []

    @contextmanager
    def bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        yield advances.append

    monkeypatch.setattr(progress, "progress_bar", bar)
    monkeypatch.setattr(progress, "POLL_MS", 1)
    return advances


def watch(tracker: Any, tasks: int | None) -> None:
    with job_progress(tracker, "group", "reading", tasks):
        assert tracker.is_at_end.wait(300)


def test_a_line_for_every_tenth_that_is_done(shown: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    watch(Tracker([0, 1, 3, 19, 21]), 20)
    assert capsys.readouterr().err.splitlines()[:2] == ["reading: 3 of 20 tasks", "reading: 19 of 20 tasks"]
    assert sum(shown) <= 20  # what a retried stage did twice is not more than all


def test_a_spark_that_is_gone_is_left_for_the_job_to_tell(
    shown: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker([5])
    monkeypatch.setattr(tracker, "getJobInfo", None)
    watch(tracker, 20)
    assert (shown, capsys.readouterr().err) == ([], "")


def test_where_spark_decides_how_many_tasks_there_are_it_only_counts(
    shown: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    watch(Tracker([0, 5, 300]), None)
    assert shown[:2] == [0, 5]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("completed", "active", "is_stalled"), [([0] * 10, 0, True), ([0] * 10, 1, False), ([0, 1] + [0] * 8, 0, False)]
)
def test_of_a_cluster_that_gives_no_executor_there_is_one_line(
    completed: list[int],
    active: int,
    is_stalled: bool,
    shown: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "STALLED_POLLS", 5)
    watch(Tracker(completed, active), None)
    assert ("reading: no task has started for 0 s" in capsys.readouterr().err) is is_stalled
