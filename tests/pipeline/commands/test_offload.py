"""What `offload` prints if there is nothing to do, and its exit code if a signal ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import cli
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
