"""What is told of a running job, with Spark's tracker played by a list of what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import progress
from pipeline.progress import job_progress


class Tracker:
    """Spark's: each time it is asked, one more of `completed`."""

    def __init__(self, completed: list[int]) -> None:
        self._completed = completed
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
        return SimpleNamespace(
            numCompletedTasks=self._completed.pop(0) if len(self._completed) > 1 else self._completed[0]
        )


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
        assert tracker.is_at_end.wait(60)


def test_a_line_for_every_tenth_that_is_done(shown: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    watch(Tracker([0, 1, 3, 19, 21]), 20)
    assert capsys.readouterr().err.splitlines()[:2] == ["reading: 3 of 20 tasks", "reading: 19 of 20 tasks"]
    assert sum(shown) <= 20  # what a retried stage did twice is not more than all


def test_where_spark_decides_how_many_tasks_there_are_it_only_counts(
    shown: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    watch(Tracker([0, 5, 300]), None)
    assert shown[:2] == [0, 5]
    assert capsys.readouterr().err == ""
