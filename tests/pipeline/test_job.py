"""A job returns results in the order of its plan. An error of a task ends the run with one line."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread

import pytest
from pyspark.sql import SparkSession

from pipeline.spark.job import JobError, attempt, run_tasks
from pipeline.spark.task_runner import SparkRunner
from tests.support.rigs.waiting import until


def squared(number: int) -> tuple[int, int]:
    return number * number, attempt()


def refused(number: int) -> int:
    raise PermissionError(f"no right to read segment {number}")


def endless(began: str) -> None:
    Path(began).touch()
    time.sleep(1200)


def test_results_come_in_the_order_of_the_plan(spark: SparkSession) -> None:
    assert run_tasks(spark, "squaring", range(5), squared) == [(0, 0), (1, 0), (4, 0), (9, 0), (16, 0)]
    assert run_tasks(spark, "squaring", [], squared) == []


def test_an_error_of_a_task_is_one_line(spark: SparkSession) -> None:
    with pytest.raises(JobError) as failed:
        run_tasks(spark, "reading", [7], refused)
    assert str(failed.value) == "reading: PermissionError: no right to read segment 7"


def test_another_thread_ends_the_running_job(spark: SparkSession, tmp_path: Path) -> None:
    runner, began = SparkRunner(spark), tmp_path / "began"
    said: list[str] = []

    def run() -> None:
        with pytest.raises(JobError) as failed:
            runner.run("waiting", [str(began)], endless)
        said.append(str(failed.value))

    running = Thread(target=run)
    running.start()
    until(began.exists)
    runner.cancel()
    running.join(300)
    assert "cancelled" in said[0]


def test_outside_spark_it_is_the_first_attempt() -> None:
    assert attempt() == 0
