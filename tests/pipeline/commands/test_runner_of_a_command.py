"""A command runs its tasks in processes of this machine, unless Spark is named."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from pipeline.commands.common import job_runner


@pytest.mark.parametrize(
    ("master", "conf", "is_submitted", "kind"),
    [
        (None, None, False, "ProcessRunner"),
        ("local[2]", None, False, "SparkRunner"),
        (None, ["spark.driver.memory=2g"], False, "SparkRunner"),
        (None, None, True, "SparkRunner"),
    ],
)
def test_spark_runs_the_tasks_if_it_is_named(
    master: str | None, conf: list[str] | None, is_submitted: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commands.common.job_session", lambda *given: nullcontext(given))
    if is_submitted:
        monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    with job_runner(master, conf, "scrub") as runner:
        assert type(runner).__name__ == kind
