"""How much a run measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    rounds: int
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


QUICK = Size(1, 320, 64, 4.0, 12, 500, 500, 100)
DEFAULT = Size(3, 512, 256, 5.0, 25, 2000, 2000, 200)
FULL = Size(5, 1024, 512, 15.0, 60, 5000, 10_000, 1000)
