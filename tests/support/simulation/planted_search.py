"""Searches the first seed that finds each planted bug: `python -m tests.support.simulation.planted_search`.

Prints a table of the seeds that were needed. Fails if a bug was not found within its seeds, or if a seed finds a defect
that nobody planted.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from functools import partial
from typing import NamedTuple

from tests.support.simulation.__main__ import outcomes
from tests.support.simulation.faults import ALL_KINDS, KINDS, plan
from tests.support.simulation.planted import PLANTED, WITHIN_SEEDS, planted
from tests.support.simulation.simulation import Outcome, simulate


class Found(NamedTuple):
    seeds: int
    violation: str | None
    """None: no seed found the bug."""
    unplanted: str | None = None
    """How the same seed fails without the bug. None: it does not fail."""


def run_kinds(kinds: tuple[str, ...], seed: int) -> Outcome:
    """Runs a seed whose faults are of some kinds; of all kinds without any."""
    return simulate(seed, plan(seed, {name: ALL_KINDS[name] for name in kinds} if kinds else KINDS))


def search(name: str, first: int, seeds: int, processes: int = 1) -> Found:
    """Runs seeds with the planted bug until one finds it. The processes that run them inherit the bug."""
    run = partial(run_kinds, PLANTED[name].kinds)
    with planted(name):
        all_outcomes = enumerate(outcomes(range(first, first + seeds), processes, run), 1)
        number, failed = next((each for each in all_outcomes if each[1].violation is not None), (seeds, None))
    if failed is None:
        return Found(seeds, None)
    return Found(number, failed.violation, run(failed.seed).violation)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulation.planted_search", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PLANTED), help="the bugs; by default all")
    parser.add_argument("--seeds", type=int, default=WITHIN_SEEDS, help="how many seeds may be needed")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    gc.collect()
    gc.freeze()
    missed = []
    print(f"{'planted bug':22} {'rule':10} {'seeds':>6}  found as")
    for name in options.names:
        found = search(name, options.first, options.seeds, options.processes)
        seeds = str(found.seeds) if found.violation is not None else f">{found.seeds}"
        told = "NOT FOUND" if found.violation is None else found.violation.strip().splitlines()[-1]
        if found.unplanted is not None:
            told = f"WITHOUT THE BUG TOO: {found.unplanted.strip().splitlines()[-1]}"
        print(f"{name:22} {PLANTED[name].rule:10} {seeds:>6}  {told}", flush=True)
        if found.violation is None or found.unplanted is not None:
            missed.append(name)
    print("every planted bug was found" if not missed else f"not found: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
