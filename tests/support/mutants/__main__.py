"""Measures how many small defects of the code the unit tests find: `python -m tests.support.mutants tiers/tasks`.

Plants one defect at a time in the code of a folder, and runs the unit tests that execute it. Prints the share of the
defects that a test finds, and lists the others. With `--planted`, searches the planted bugs of the simulation too.
Fails if a test fails without a defect. With `--compare`, fails if the share of a folder is lower than in that report.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.mutants.gate import run_gate
from tests.support.mutants.mutations import Mutant, mutants_of
from tests.support.mutants.report import Report, survivors


def sample(mutants: Iterable[Mutant], seed: int, count: int) -> list[Mutant]:
    """Returns some of the mutants. A mutant keeps its place in the order of a seed while its name stays the same."""
    return sorted(mutants, key=lambda one: hashlib.sha256(f"{seed} {one.name}".encode()).digest())[:count]


def mutants_in(folder: str) -> list[Mutant]:
    """Returns the mutants of all files of a folder, or of one file. Imports these files."""
    path = Path(folder)
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    for file in files:
        importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    return [mutant for file in files for mutant in mutants_of(file.as_posix(), file.read_text())]


def tests_of(folders: Sequence[str]) -> list[str]:
    """Returns the folders of the unit tests of the packages that the folders belong to."""
    return sorted({f"tests/unit/{Path(folder).parts[0]}" for folder in folders})


def search_planted_bugs(seeds: int) -> None:
    """Searches each planted bug of the simulation in some seeds, and prints a line for each."""
    from tests.support.simulation.planted import PLANTED
    from tests.support.simulation.planted_search import search

    for name in PLANTED:
        found = search(name, 0, seeds)
        print(f"{name:28} {'found' if found.violation is not None else 'NOT FOUND':9} {found.seeds} seeds", flush=True)


def about(options: argparse.Namespace) -> dict[str, str | int | None]:
    git = ["git", "log", "-1", "--format=%h of %cs"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    return {"seed": options.seed, "max": options.max, "commit": commit, "machine": machine}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutants", description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders or files of the product")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample")
    parser.add_argument("--max", type=int, default=150, help="mutants per folder")
    parser.add_argument("--seconds", type=float, default=1_800, help="the time for all mutants together")
    parser.add_argument("--more-seconds", type=float, default=5, help="a test times out so long after 3 times its time")
    parser.add_argument("--tests", nargs="+", help="test folders; by default the unit tests of the package")
    parser.add_argument("--planted", type=int, metavar="SEEDS", help="search the planted bugs too, in that many seeds")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the outcomes of these folders to a report")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="fail if a kill rate is lower than in a report")
    options = parser.parse_args()
    began_s = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began_s:5.0f} s  {line}", file=sys.stderr, flush=True)

    folders = {folder.rstrip("/"): mutants_in(folder) for folder in options.folders}
    for folder, mutants in folders.items():
        tell(f"{folder}: {len(mutants)} mutants, a sample of {min(len(mutants), options.max)}")
    chosen = {folder: sample(mutants, options.seed, options.max) for folder, mutants in folders.items()}
    tests = options.tests or tests_of(list(folders))
    gate = run_gate(chosen, tests, options.seconds, options.more_seconds, tell)
    if gate.broken:
        print("\n".join(["these tests fail without a mutant:", *gate.broken]))
        return 1
    report = Report.of(gate.results, about(options))
    by_name = {one.name: one for mutants in chosen.values() for one in mutants}
    print("\n".join([*report.table(), "", *survivors(gate.results, by_name)]))
    if options.planted is not None:
        search_planted_bugs(options.planted)
    if options.save is not None:
        report.save(options.save)
    if options.compare is None:
        return 0
    earlier = Report.load(options.compare)
    fallen = [*report.fallen(earlier)]
    print("\n".join([*report.new_survivors(earlier), *fallen]))
    return 1 if fallen else 0


if __name__ == "__main__":
    sys.exit(main())
