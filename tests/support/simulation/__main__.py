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

from tests.support.simulation.coverage import Coverage
from tests.support.simulation.environment import never_collect
from tests.support.simulation.faults import DOUBTS, KINDS, Kinds, few_kinds, plan
from tests.support.simulation.shrinking import report, shortened
from tests.support.simulation.simulation import Outcome, simulate
from tests.support.simulation.stories_list import STORIES, failure

_SEEDS_PER_PROCESS = 20
"""Processes are replaced soon, since they do not collect what a run leaves behind."""
_PROGRESS_S = 30.0


Table = Callable[[int], Kinds]
"""Returns the kinds of faults of a seed, with their weights."""


def _usual(seed: int) -> Kinds:
    return KINDS


def _doubts(seed: int) -> Kinds:
    return DOUBTS


def run_seed(seed: int, table: Table = _usual) -> Outcome:
    return simulate(seed, plan(seed, table(seed)))


def with_shorter_faults(run: Callable[[int], Outcome], seed: int) -> Outcome:
    """Runs a seed. A failing outcome has a shortened list of faults, and the counts of the whole one.

    The process of the pool does the work: a run replaces clocks, which the threads of the pool's owner need."""
    outcome = run(seed)
    return (
        outcome
        if outcome.violation is None
        else replace(shortened(outcome), counts=outcome.counts, planned=outcome.planned)
    )


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
    parser.add_argument("--doubts", action="store_true", help="with the faults that leave a doubt about the past")
    parser.add_argument("--plans", action="store_true", help="count the faults of the seeds' plans, and run nothing")
    parser.add_argument("--stories", action="store_true", help="tell all stories")
    options = parser.parse_args()
    if options.stories:
        return _stories(options.processes)
    table, variables = _usual, ""
    if options.few_kinds:
        table, variables = few_kinds, " FEW_KINDS=1"
    elif options.doubts:
        table, variables = _doubts, " DOUBTS=1"
    run = partial(run_seed, table=table)
    seeds, coverage = range(options.first, options.first + options.seeds), Coverage()
    if options.plans:
        for seed in seeds:
            coverage.add(plan(seed, table(seed)))
        print("\n".join(coverage.lines()))
        return 0
    if options.seed is not None:
        return _one(run(options.seed), variables)
    gc.collect()
    gc.freeze()  # what was imported is not garbage, and need not be looked at after every run
    began_s = told_s = time.perf_counter()
    totals: Counter[str] = Counter()
    failed: list[Outcome] = []
    for outcome in outcomes(seeds, options.processes, partial(with_shorter_faults, run)):
        totals.update(outcome.counts)
        totals["seeds"] += 1
        coverage.add(outcome.planned)
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
    print("\n".join(coverage.lines()))
    print("no violation" if not failed else f"violations in {len(failed)} seeds: {sorted(one.seed for one in failed)}")
    return 1 if failed else 0


def _stories(processes: int) -> int:
    failed = []
    with multiprocessing.get_context("fork").Pool(processes, never_collect, maxtasksperchild=1) as pool:
        for script, told in zip(STORIES.values(), pool.imap(failure, STORIES), strict=True):
            state = "ok" if told is None else "FAILED"
            print(f"{state:6} {script.name}: {script.says}", *([] if told is None else [f"       {told}"]), sep="\n")
            if state == "FAILED":
                failed.append(script.name)
    print("all stories go as they must" if not failed else f"{len(failed)} stories fail")
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
