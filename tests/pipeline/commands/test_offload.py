"""`offload` without anything to do prints words, and no table without rows."""

from __future__ import annotations

import pytest

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
