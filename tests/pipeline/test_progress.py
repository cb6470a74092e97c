"""The reported progress of a running job. A list plays Spark's tracker."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.spark import progress
from pipeline.spark.progress import job_progress
from tests.support.tiers.recorded_progress import RecordedProgress


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
