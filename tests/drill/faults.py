"""The plan of a drill: the start, the target and the duration of each fault. The same seed makes the same plan.

Faults come in bursts with calm between them. A burst never hits all proxies, and the calm is longer than a partition
may be without an owner. The calm gives the proxies the time to recover.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    PROXY_KILL = "proxy killed, started again"
    PROXY_STALL = "proxy stopped, shorter than its session"
    PROXY_FREEZE = "proxy stopped, longer than its session"
    STORE_FREEZE = "store stopped"
    STORE_KILL = "store killed, started again"
    STORE_OUTAGE = "store gone for a long time"
    BROKER_STALL = "broker stopped"

    @property
    def is_of_the_store(self) -> bool:
        return self in (FaultKind.STORE_FREEZE, FaultKind.STORE_KILL, FaultKind.STORE_OUTAGE)


_PROXY_FAULTS = (FaultKind.PROXY_KILL, FaultKind.PROXY_FREEZE, FaultKind.PROXY_FREEZE, FaultKind.PROXY_STALL)
_OTHER_FAULTS = (FaultKind.STORE_FREEZE, FaultKind.STORE_KILL, FaultKind.BROKER_STALL)
_DURATIONS_S = {
    FaultKind.PROXY_KILL: (0.0, 12.0),
    FaultKind.PROXY_STALL: (0.5, 4.0),
    FaultKind.PROXY_FREEZE: (9.0, 16.0),
    FaultKind.STORE_FREEZE: (2.0, 15.0),
    FaultKind.STORE_KILL: (1.0, 15.0),
    FaultKind.STORE_OUTAGE: (50.0, 60.0),
    FaultKind.BROKER_STALL: (0.5, 3.0),
}
OUTAGE_FROM_S = 200.0
"""The shortest duration of a drill that has a long outage in its middle.

The outage lasts more than 120 rounds of the tasks, which would be an hour with the default interval."""
_CALM_S = (12.0, 18.0)
_WITHIN_A_BURST_S = 6.0
WARM_UP_S = 6.0


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """The time since the start of the drill."""
    kind: FaultKind
    proxy: int
    """The number of the proxy. -1: the fault hits no proxy."""
    duration_s: float

    def __str__(self) -> str:
        whom = "" if self.proxy < 0 else f" (proxy {self.proxy})"
        return f"{self.kind}{whom}, {self.duration_s:.1f} s"


def _shuffled(chance: random.Random, kinds: Sequence[FaultKind]) -> Iterator[FaultKind]:
    """Yields all kinds in a random order, then in another one. A purely random choice may leave out a kind."""
    while True:
        yield from chance.sample(kinds, len(kinds))


def plan(seed: int, seconds: float, proxies: int, *, with_broker: bool = True) -> list[Fault]:
    """Returns the faults in order of time. `with_broker`: whether to hit the broker, which other tests may share."""
    chance = random.Random(seed)
    of_a_proxy = _shuffled(chance, _PROXY_FAULTS)
    others = _shuffled(chance, [kind for kind in _OTHER_FAULTS if with_broker or kind is not FaultKind.BROKER_STALL])
    faults: list[Fault] = []
    at_s = WARM_UP_S
    outage_is_due = seconds >= OUTAGE_FROM_S
    while True:
        burst: list[Fault] = []
        if outage_is_due and at_s > seconds / 3:
            outage_is_due = False
            burst.append(Fault(at_s, FaultKind.STORE_OUTAGE, -1, chance.uniform(*_DURATIONS_S[FaultKind.STORE_OUTAGE])))
        for proxy in chance.sample(range(proxies), chance.randint(1, max(1, proxies - 1))):
            kind = next(of_a_proxy)
            begin_s = at_s + chance.uniform(0, _WITHIN_A_BURST_S)
            burst.append(Fault(begin_s, kind, proxy, chance.uniform(*_DURATIONS_S[kind])))
        if not burst[0].kind.is_of_the_store and chance.random() < 0.6:
            kind = next(others)
            begin_s = at_s + chance.uniform(0, _WITHIN_A_BURST_S)
            burst.append(Fault(begin_s, kind, -1, chance.uniform(*_DURATIONS_S[kind])))
        end_s = max(fault.at_s + fault.duration_s for fault in burst)
        if end_s > seconds and faults:
            return sorted(faults, key=lambda fault: fault.at_s)
        faults += burst
        at_s = end_s + chance.uniform(*_CALM_S)
