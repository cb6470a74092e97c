"""The command line of the scenarios, with scenarios that start no server."""

from __future__ import annotations

from pathlib import Path

from bench.command import parser_of, run_scenarios
from bench.measure import results
from bench.measure.results import ScenarioResult
from bench.rig.stage import Stage
from tests.support.measured_run import measured_run


def measured(stage: Stage) -> ScenarioResult:
    found = measured_run().scenario("backfill")
    assert found is not None
    return found


def failed(stage: Stage) -> ScenarioResult:
    raise TimeoutError("the records do not leave the broker")


def test_a_failed_scenario_leaves_the_others_a_report(tmp_path: Path) -> None:
    given = parser_of("").parse_args(["--out", str(tmp_path / "out")])
    assert run_scenarios([failed, measured, failed], given) == 1
    assert [one.name for one in results.read(tmp_path / "out" / "results.json").scenarios] == ["backfill"]
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


def test_options_change_the_size(tmp_path: Path) -> None:
    given = parser_of("").parse_args(["--quick", "--rounds", "7", "--mib", "99", "--out", str(tmp_path)])
    assert run_scenarios([measured], given) == 0
    size = results.read(tmp_path / "results.json").size
    assert (size["rounds"], size["long_rounds"], size["history_mib"]) == (7, 7, 99)
