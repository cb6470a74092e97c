"""Removes one safety check at a time: `python -m tests.support.simulation.removed_checks_search [WORDS]`.

Prints for each check of `removed_checks` what fails without it: the first unit test, the stories, and the first seed of
the simulation with faults that lead to the check. Fails if nothing shows that a check is missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.support.mutants.gate import Outcome, run_gate
from tests.support.mutants.live_functions import applied
from tests.support.repository import ROOT
from tests.support.simulation.__main__ import outcomes
from tests.support.simulation.environment import never_collect
from tests.support.simulation.planted_search import run_kinds
from tests.support.simulation.removed_checks import CHECKS, RemovedCheck
from tests.support.simulation.stories_list import STORIES, failure

_UNIT_TESTS = "tests/unit/tiers/tasks"
_UNIT_SECONDS = 3_600


@dataclass
class Row:
    """What fails without a check."""

    check: str
    what: str
    unit: str | None = None
    """The first unit test that fails. Empty: none does. None: not tried."""
    stories: list[str] | None = None
    """The stories that fail, and do not fail with the check. None: not tried."""
    seeds: int | None = None
    """How many seeds were run, up to the first that fails. None: not tried."""
    violation: str | None = None
    """The violation in the last of these seeds, which fails without the check alone. None: there is none."""
    unplanted: list[str] = field(default_factory=list)
    """The seeds that fail with the check, too, and how: they show another defect."""

    @property
    def is_found(self) -> bool:
        return bool(self.unit or self.stories or self.violation is not None)

    def lines(self) -> str:
        unit = "not tried" if self.unit is None else self.unit.rpartition("/")[2] or "-"
        stories = "not tried" if self.stories is None else ", ".join(self.stories) or "-"
        seeds = "not tried" if self.seeds is None else f"none of {self.seeds}"
        if self.violation is not None:
            seeds = f"after {self.seeds}: {_last_line(self.violation)}"
        seeds += "".join(f"\n    WITH THE CHECK TOO: seed {each}" for each in self.unplanted)
        found = "" if self.is_found else "  NOT FOUND"
        return f"{self.check} ({self.what}){found}\n    unit: {unit}\n    stories: {stories}\n    seeds: {seeds}"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _unit_tests(rows: Sequence[Row]) -> None:
    """Runs the unit tests that execute the function of each check, up to the first that fails."""
    checks = {"checks": [CHECKS[row.check] for row in rows]}
    gate = run_gate(checks, [_UNIT_TESTS], _UNIT_SECONDS, 5, lambda line: print(line, file=sys.stderr, flush=True))
    if gate.broken:
        raise RuntimeError(f"these tests fail with all checks: {gate.broken}")
    for row, tested in zip(rows, gate.results["checks"], strict=True):
        row.unit = tested.by if tested.outcome in (Outcome.KILLED, Outcome.TIMED_OUT) else ""


def _failing_stories(processes: int) -> set[str]:
    """Returns the stories that fail now. The processes that tell them inherit what this process has removed."""
    with multiprocessing.get_context("fork").Pool(processes, never_collect, maxtasksperchild=1) as pool:
        return {name for name, told in zip(STORIES, pool.imap(failure, STORIES), strict=True) if told is not None}


def _search_seeds(row: Row, check: RemovedCheck, first: int, seeds: int, processes: int) -> None:
    """Runs seeds without the check until one fails that does not fail with the check."""
    run, left = partial(run_kinds, check.kinds), range(first, first + seeds)
    while left and row.violation is None:
        with applied(ROOT, check):
            failed = next((one for one in outcomes(left, processes, run) if one.violation is not None), None)
        row.seeds = seeds if failed is None else failed.seed + 1 - first
        if failed is None:
            return
        (with_check,) = outcomes([failed.seed], 1, run)
        if with_check.violation is None:
            row.violation = failed.violation
        else:
            row.unplanted.append(f"{failed.seed}: {_last_line(with_check.violation)}")
        left = range(failed.seed + 1, first + seeds)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.simulation.removed_checks_search", description=__doc__
    )
    parser.add_argument("words", nargs="*", help="only the checks whose names have one of these words")
    parser.add_argument("--unit", action="store_true", help="run the unit tests")
    parser.add_argument("--stories", action="store_true", help="tell the stories")
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds to run for each check")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, help="run no seeds of another check after this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--save", type=Path, help="write the rows to a file, as JSON")
    options = parser.parse_args()
    began_s = time.monotonic()
    rows = [
        Row(name, check.what)
        for name, check in CHECKS.items()
        if not options.words or any(word in name for word in options.words)
    ]
    for path in {CHECKS[row.check].path for row in rows}:
        importlib.import_module(path.removesuffix(".py").replace("/", "."))
    if options.unit:
        _unit_tests(rows)
    fail_anyway = _failing_stories(options.processes) if options.stories else set()
    for row in rows:
        check = CHECKS[row.check]
        if options.stories:
            with applied(ROOT, check):
                row.stories = sorted(_failing_stories(options.processes) - fail_anyway)
        if options.seeds and (options.seconds is None or time.monotonic() - began_s < options.seconds):
            _search_seeds(row, check, options.first, options.seeds, options.processes)
        print(row.lines(), flush=True)
        if options.save is not None:
            options.save.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    missed = [row.check for row in rows if not row.is_found]
    print("\n".join([f"{len(rows) - len(missed)} of {len(rows)} checks are found", *missed]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
