"""How much a run measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    rounds: int
    long_rounds: int
    """The rounds of the scenarios whose rounds take longest: the tail, the first record, and passing through."""
    history_mib: int
    """The size of each topic that backfills read. It is larger than the caches of the proxy."""
    passed_mib: int
    """The size of the topic that is read through the proxy, and of one run of a producer."""
    phase_s: float
    """How long each number of consumers backfills beside the tail."""
    seeks: int
    round_trips: int
    connections: int
    pollers: int


QUICK = Size(1, 1, 320, 64, 3.0, 12, 500, 500, 100)
DEFAULT = Size(3, 2, 384, 192, 4.0, 20, 1500, 2000, 200)
FULL = Size(5, 5, 1024, 512, 15.0, 50, 5000, 10_000, 1000)
