"""A job returns results in the order of its plan. An error of a task ends the run with one line."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline.spark.job import attempt, run_tasks
from pipeline.spark.runner import SparkRunner
from tests.support.rigs.waiting import until
from tiers.upkeep.runner import JobError


def squared(number: int) -> tuple[int, int]:
    return number * number, attempt()


def refused(number: int) -> int:
    raise PermissionError(f"no right to read segment {number}")


async def endless_task(began: str) -> None:
    await asyncio.to_thread(Path(began).touch)
    await asyncio.sleep(1200)


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
    running = asyncio.create_task(SparkRunner(session).run("merging", ["began"], endless_task))
    await asyncio.to_thread(began.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    assert len(set(cancels)) == 1


async def test_an_interrupt_ends_the_job_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    began = tmp_path / "began"
    running = asyncio.create_task(SparkRunner(spark).run("waiting", [str(began)], endless_task))
    await asyncio.to_thread(until, began.exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_outside_spark_it_is_the_first_attempt() -> None:
    assert attempt() == 0
