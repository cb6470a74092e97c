"""Shortens the list of faults of a failing run, as long as the run still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.support.simulation.faults import Fault
from tests.support.simulation.simulation import Outcome, simulate


def shortened(
    outcome: Outcome, run: Callable[[int, Sequence[Fault]], Outcome] = simulate, max_runs: int = 60
) -> Outcome:
    """Returns the outcome of the shortest failing list that was found."""
    size = max(1, len(outcome.faults) // 2)
    runs = 0
    while runs < max_runs and outcome.faults:
        is_shorter = False
        for first in range(0, len(outcome.faults), size):
            fewer = [*outcome.faults[:first], *outcome.faults[first + size :]]
            runs += 1
            tried = run(outcome.seed, fewer)
            if tried.violation is not None:
                outcome, is_shorter = tried, True
                break
            if runs >= max_runs:
                break
        if not is_shorter:
            if size == 1:
                break
            size = max(1, size // 2)
        else:
            size = min(size, max(1, len(outcome.faults)))
    return outcome


def report(outcome: Outcome, variables: str = "") -> str:
    """Returns what a person needs to repeat the failing run.

    `variables` are those of `make simulate` that change the plan of a seed."""
    lines = [
        f"seed {outcome.seed}: {outcome.violation}",
        f"with {len(outcome.faults)} faults (make simulate SEED={outcome.seed}{variables}):",
    ]
    return "\n".join([*lines, *(f"  {fault}" for fault in outcome.faults)])
