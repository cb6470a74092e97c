"""Runs seeds of the simulation: `python -m tests.support.simulation --seeds 10000`.

Prints seeds and faults per second. A failing seed is printed with a shortened list of faults that still fails.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from tests.support.simulation.environment import never_collect
from tests.support.simulation.faults import few_kinds, plan
from tests.support.simulation.shrinking import report, shortened
from tests.support.simulation.simulation import Outcome, simulate

_SEEDS_PER_PROCESS = 20
"""Processes are replaced soon, since they do not collect what a run leaves behind."""
_PROGRESS_S = 30.0


def run_seed(seed: int) -> Outcome:
    return simulate(seed, plan(seed))


def run_seed_of_few_kinds(seed: int) -> Outcome:
    return simulate(seed, plan(seed, few_kinds(seed)))


def with_shorter_faults(run: Callable[[int], Outcome], seed: int) -> Outcome:
    """Runs a seed. A failing outcome has a shortened list of faults, and the counts of the whole one.

    The process of the pool does the work: a run replaces clocks, which the threads of the pool's owner need."""
    outcome = run(seed)
    return outcome if outcome.violation is None else replace(shortened(outcome), counts=outcome.counts)


def outcomes(seeds: Iterable[int], processes: int, run: Callable[[int], Outcome] = run_seed) -> Iterator[Outcome]:
    """Yields the outcomes in the order of the seeds."""
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, initializer=never_collect, maxtasksperchild=_SEEDS_PER_PROCESS) as pool:
        yield from pool.imap(run, seeds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone, and print what happened")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, help="stop after this time, however many seeds were run")
    parser.add_argument("--few-kinds", action="store_true", help="give each seed a few random kinds of faults")
    options = parser.parse_args()
    run, variables = (run_seed_of_few_kinds, " FEW_KINDS=1") if options.few_kinds else (run_seed, "")
    if options.seed is not None:
        return _one(run(options.seed), variables)
    gc.collect()
    gc.freeze()  # what was imported is not garbage, and need not be looked at after every run
    began_s = told_s = time.perf_counter()
    totals: Counter[str] = Counter()
    failed: list[Outcome] = []
    seeds = range(options.first, options.first + options.seeds)
    for outcome in outcomes(seeds, options.processes, partial(with_shorter_faults, run)):
        totals.update(outcome.counts)
        totals["seeds"] += 1
        if outcome.violation is not None:
            failed.append(outcome)
            print(report(outcome, variables), flush=True)
        now_s = time.perf_counter()
        if now_s - told_s >= _PROGRESS_S:
            told_s = now_s
            print(_speed(totals, now_s - began_s), flush=True)
        if options.seconds is not None and now_s - began_s >= options.seconds:
            break
    print(_speed(totals, time.perf_counter() - began_s))
    print(", ".join(f"{count:,} {what}" for what, count in sorted(totals.items())))
    print("no violation" if not failed else f"violations in {len(failed)} seeds: {sorted(one.seed for one in failed)}")
    return 1 if failed else 0


def _speed(totals: Counter[str], seconds: float) -> str:
    seeds, faults = totals["seeds"], totals["faults"]
    return (
        f"{seeds:,} seeds and {faults:,} faults in {seconds:.0f} s:"
        f" {seeds / seconds:.2f} seeds/s, {faults / seconds:.1f} faults/s"
    )


def _one(outcome: Outcome, variables: str) -> int:
    print("\n".join(outcome.events))
    print(outcome.counts)
    if outcome.violation is None:
        print(f"seed {outcome.seed}: no violation, trace {outcome.trace}")
        return 0
    print(report(shortened(outcome), variables))
    return 1


if __name__ == "__main__":
    sys.exit(main())
