"""The command line of the jobs: quantities, runners, and what `offload` prints."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.commands.common import job_runner
from pipeline.commands.offload import show_plan, show_report
from pipeline.offload.driver import OffloadReport


def test_an_offload_reports_that_nothing_is_to_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan([], as_json=False)
    show_report(OffloadReport((), waves=0, seconds=1.0, cpu_seconds=0.0), as_json=False)
    told = capsys.readouterr()
    assert told.out == ""
    assert [line.split(":")[0] for line in told.err.splitlines()] == ["nothing is to be copied"] * 2


def test_the_json_of_an_empty_offload_is_an_empty_list(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan([], as_json=True)
    assert capsys.readouterr().out.split() == ["[]"]


@pytest.mark.parametrize(("more", "code", "said"), [(["--interval", "1m"], 0, "offload: ended\n"), ([], 130, "")])
def test_an_interrupt_while_a_runner_starts_is_the_end_of_a_service(
    more: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.commands.offload.job_runner", interrupted)
    config = tmp_path / "tidegate.toml"
    config.write_text("[upstream]\nbootstrap.servers = 'k:9092'\n")
    assert cli.run(["offload", "--config", str(config), *more]) == code
    assert capsys.readouterr().err == said


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
