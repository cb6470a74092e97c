"""Counts the faults of runs, and the pairs of faults that were in effect before the same recovery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from tests.support.simulation.faults import Fault

GROUPS: Mapping[str, frozenset[str]] = {
    "metadata lost": frozenset(
        {"metadata-tail-lost", "metadata-head-lost", "metadata-lost-in-silence", "metadata-restored"}
    ),
    "store outage": frozenset({"store-down", "store-refuses-reads", "store-refuses-writes", "store-cut"}),
    "takeover": frozenset(
        {"crash", "restart", "power-cut", "old-copy", "isolate", "cut-off-for-long", "frozen-owner", "rolling-upgrade"}
    ),
    "election": frozenset(
        {"elect", "unclean-election", "out-of-date-replica", "emptied-replica", "late-log-start", "there-and-back"}
    ),
    "retention": frozenset({"retention", "broker-removes"}),
}
"""The kinds of faults whose pairs matter most. `LEAST_PAIRS` of each pair are in 10,000 plans."""
LEAST_PAIRS = 100


class Coverage:
    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        """How many faults of each kind the plans have."""
        self.pairs: Counter[tuple[str, str]] = Counter()
        """How many plans have faults of both groups."""

    def add(self, faults: Sequence[Fault]) -> None:
        kinds = [fault.kind for fault in faults]
        self.kinds.update(kinds)
        self.pairs.update(combinations([name for name, group in GROUPS.items() if group & {*kinds}], 2))

    def lines(self) -> Iterable[str]:
        yield "faults: " + ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
        names = list(GROUPS)
        yield "runs with both:" + "".join(f"{name:>15}" for name in names[1:])
        for number, name in enumerate(names[:-1]):
            counts = [f"{self.pairs[name, other]:15,}" for other in names[number + 1 :]]
            yield f"{name:>15}" + " " * 15 * number + "".join(counts)
