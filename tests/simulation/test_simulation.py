"""Runs seeds of the simulated cluster: what must never happen does not, whatever fails.

`make simulate SEEDS=10000` runs more of them. A failure prints the seed and the faults that still lead to it.
"""

from __future__ import annotations

import time
from itertools import combinations

import pytest

from tests.support.marks import full
from tests.support.simulation.__main__ import outcomes
from tests.support.simulation.coverage import GROUPS, LEAST_PAIRS, Coverage
from tests.support.simulation.faults import DOUBTS, KINDS, LONG_CUTS, RELOADS, UNMOUNTS, Fault, Kinds, plan
from tests.support.simulation.planted import PLANTED, planted
from tests.support.simulation.planted_search import search
from tests.support.simulation.shrinking import report, shortened
from tests.support.simulation.simulation import Outcome, simulate

MAX_SEEDS = 200
_SHORTER_RUNS = 20


@pytest.mark.parametrize("budget_s", [10, *full(45)])
def test_no_seed_violates_a_rule(budget_s: float) -> None:
    """Runs as many seeds as fit in the budget, and one at least.

    A slow machine runs fewer seeds in the same time. A failure there prints the faults that few shorter runs leave."""
    end_s = time.perf_counter() + budget_s
    for outcome in outcomes(range(MAX_SEEDS), 1):
        assert outcome.violation is None, report(shortened(outcome, max_runs=_SHORTER_RUNS))
        if time.perf_counter() >= end_s:
            break


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(412, id="a-follower-cannot-append", marks=pytest.mark.full),
        pytest.param(471, id="no-proxy-recorded-a-deletion"),
        pytest.param(8404749, id="all-disks-are-full", marks=pytest.mark.full),
        pytest.param(8703986, id="a-gap-follows-a-gap", marks=pytest.mark.full),
    ],
)
def test_no_rare_state_violates_a_rule(seed: int) -> None:
    outcome = simulate(seed, plan(seed))
    assert outcome.violation is None, report(shortened(outcome, max_runs=_SHORTER_RUNS))


@pytest.mark.parametrize("seed", [1, *full(2, 3)])
def test_no_reload_violates_a_rule(seed: int) -> None:
    faults = plan(seed, RELOADS)
    assert "reload" in {fault.kind for fault in faults}
    outcome = simulate(seed, faults)
    assert outcome.violation is None, report(outcome)


@pytest.mark.parametrize("seed", [1, *full(2, 3)])
def test_no_unmounted_store_violates_a_rule(seed: int) -> None:
    outcome = simulate(seed, plan(seed, UNMOUNTS))
    assert any("store-unmounted" in event for event in outcome.events)
    assert outcome.violation is None, report(outcome)


@pytest.mark.parametrize("seed", [1, *full(2)])
def test_no_long_cut_violates_a_rule(seed: int) -> None:
    outcome = simulate(seed, plan(seed, LONG_CUTS))
    assert any("cut-off-for-long" in event for event in outcome.events)
    assert outcome.violation is None, report(outcome)


def test_two_runs_of_a_seed_are_the_same() -> None:
    one, again = simulate(301, plan(301)), simulate(301, plan(301))
    assert one.trace == again.trace
    assert one.counts == again.counts
    assert one.trace != simulate(303, plan(303)).trace


@pytest.mark.parametrize("seed", [301, *full(302)])
def test_the_wire_adds_nothing_to_a_run(seed: int) -> None:
    """Messages are handed over as objects. A run that encodes and decodes all of them is the same."""
    assert simulate(seed, plan(seed), has_wire=True).trace == simulate(seed, plan(seed)).trace


def test_a_run_without_faults_copies_trims_and_reads_both_tiers() -> None:
    outcome = simulate(1, [])
    assert outcome.violation is None
    for what in ("segments", "trims", "remote reads"):
        assert outcome.counts[what] > 10


@pytest.mark.parametrize("table", [KINDS, DOUBTS])
def test_each_pair_of_faults_is_in_many_plans(table: Kinds) -> None:
    coverage = Coverage()
    for seed in range(1_000):
        coverage.add(plan(seed, table))
    assert min(coverage.pairs[pair] for pair in combinations(GROUPS, 2)) >= LEAST_PAIRS / 10
    assert set(table) == set(coverage.kinds)


@pytest.mark.parametrize("seed", [1, *full(2, 3, 305)])
def test_no_doubt_violates_a_rule(seed: int) -> None:
    outcome = simulate(seed, plan(seed, DOUBTS))
    assert outcome.violation is None, report(outcome)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("trims-at-once", 0),
        ("hole-moves-log-start", 3),
        *full(
            ("forgets-aborts", 4),
            ("never-asks-the-group", 23),
            ("takes-any-store", 2),
            ("lost-metadata", 78),
            ("foreign-log-start", 1),
        ),
    ],
)
def test_a_planted_bug_is_found(name: str, first: int) -> None:
    """Begins with a seed that finds the bug, so that one run is enough. The next ones count if the faults change."""
    found = search(name, first, 20)
    assert found.violation is not None
    assert found.unplanted is None


@pytest.mark.parametrize("name", PLANTED)
def test_every_bug_can_be_planted(name: str) -> None:
    with planted(name):
        pass


def test_a_failing_plan_is_shortened() -> None:
    def run(seed: int, faults: object) -> Outcome:
        assert isinstance(faults, list)
        kinds = {fault.kind for fault in faults}
        return Outcome(seed, faults, "lost" if {"crash", "elect"} <= kinds else None)

    faults = [
        Fault(1.0 + n, kind, 0, 0.5, 1.0) for n, kind in enumerate(["pause", "crash", "disk-full", "elect", "clock"])
    ]
    found = shortened(Outcome(3, faults, "lost"), run)
    assert [fault.kind for fault in found.faults] == ["crash", "elect"]
    assert "seed 3: lost" in report(found)
    assert "(make simulate SEED=3 FEW_KINDS=1):" in report(found, " FEW_KINDS=1")


def test_a_planted_bug_is_gone_afterwards() -> None:
    with planted("expires-one-more"):
        pass
    assert simulate(2, []).violation is None
