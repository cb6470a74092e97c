"""The command line that all scenarios share: options, progress, tables in the terminal, and the files of the report."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import results
from bench.measure.processes import machine
from bench.measure.results import Run, ScenarioResult
from bench.report import page
from bench.report.sections import COLUMNS, columns_of
from bench.rig.size import DEFAULT, FULL, QUICK, Size
from bench.rig.stage import Peers, Stage
from bench.rig.versions import versions
from tests.support.servers.jars import ROOT, ServerUnavailable

Scenario = Callable[[Stage], ScenarioResult]
OUT = Path("build/bench")


def question_of(docstring: str | None) -> str:
    """Returns the first line of a scenario's docstring, which is the question that it answers."""
    return (docstring or "").partition("\n")[0]


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = arguments.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const=QUICK, help="one small round")
    size.add_argument("--full", dest="size", action="store_const", const=FULL, help="more and longer rounds")
    arguments.add_argument("--rounds", type=int, help="how often everything is measured")
    arguments.add_argument("--mib", type=int, help="the size of the history that is read back")
    arguments.add_argument("--out", type=Path, default=OUT, help=f"the folder of the report (default: {OUT})")
    peers = arguments.add_argument_group("proxies to compare with")
    peers.add_argument("--kafka-proxy", type=Path, help="the binary of grepplabs kafka-proxy")
    peers.add_argument("--kroxylicious", type=Path, help="the folder of Kroxylicious")
    arguments.set_defaults(size=DEFAULT)
    return arguments


def size_of(given: argparse.Namespace) -> Size:
    size: Size = given.size
    asked = {"rounds": given.rounds, "long_rounds": given.rounds, "history_mib": given.mib}
    return dataclasses.replace(size, **{name: value for name, value in asked.items() if value})


def new_run(given: argparse.Namespace) -> Run:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return Run(
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit.stdout.strip() or "unknown",
        command=" ".join(["python -m", _module(), *sys.argv[1:]]),
        machine=machine(),
        versions=versions(),
        size=dataclasses.asdict(size_of(given)),
    )


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else sys.argv[0]


def run_scenarios(scenarios: Sequence[Scenario], given: argparse.Namespace) -> int:
    """Runs scenarios on one stage. Returns the exit code: 1 if a server is missing or a scenario failed."""
    console = _console()
    run = new_run(given)
    began = time.monotonic()
    failures: list[str] = []
    found: list[ScenarioResult] = []
    try:
        with Stage(size_of(given), console, Peers(given.kafka_proxy, given.kroxylicious)) as stage:
            for scenario in scenarios:
                scenario_began = time.monotonic()
                try:
                    result = scenario(stage)
                except (TimeoutError, RuntimeError) as error:
                    failures.append(f"{scenario.__module__}: {error}")
                    console.print(failures[-1], style="red", highlight=False, markup=False, soft_wrap=True)
                    continue
                result.seconds = round(time.monotonic() - scenario_began, 1)
                found.append(result)
                show(console, result)
                run.seconds = round(time.monotonic() - began, 1)
                finish(run, found, given)  # a run that is interrupted has the report of what it measured
    except ServerUnavailable as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    console.print(f"The report: {given.out / page.NAME}", highlight=False)
    return 1 if failures else 0


def finish(run: Run, found: Sequence[ScenarioResult], given: argparse.Namespace) -> None:
    """Writes the files of the run so far."""
    run.scenarios = list(found)
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    results.write(run, out / "results.json")
    page.write(run, out)


def show(console: Console, result: ScenarioResult) -> None:
    """Prints the medians of all rounds, with the least and the greatest."""
    figures = columns_of(result)
    table = Table(title=f"{result.question} ({result.seconds:.0f} s)", title_justify="left")
    table.add_column("")
    table.add_column("")
    for name in figures:
        table.add_column(COLUMNS[name], justify="right")
    table.add_column("noisy")
    for case in result.cases():
        for way in result.ways():
            spreads = [result.spread(case, way, figure) for figure in figures]
            if not any(one.rounds for one in spreads):
                continue
            cells = ["" if not one.rounds else _cell(one.median, one.least, one.greatest) for one in spreads]
            table.add_row(case, way, *cells, str(result.noisy_rounds(case, way) or ""))
    console.print(table)
    for note in result.notes:
        console.print(note, style="dim", highlight=False, markup=False)


def _cell(median: float, least: float, greatest: float) -> str:
    if least == greatest:
        return f"{median:.3g}"
    return f"{median:.3g} ({least:.3g}-{greatest:.3g})"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)
