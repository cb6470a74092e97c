"""`Drill` runs load, readers, audits and faults concurrently for a while. Then all faults end, and it reads everything.

Every certain record must then be readable through every proxy. `DrillResult` has the counts and the broken invariants.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tests.drill.acknowledged_records import AcknowledgedRecords, Place
from tests.drill.faults import Fault, FaultKind, plan
from tests.drill.outage_probe import OutageProbe
from tests.drill.proxy_watch import OWNER_BACK_S, ProxyWatch
from tests.drill.readers import Reader
from tests.drill.rig import DrillRig
from tests.drill.tier_audit import TierAudit
from tests.drill.violations import OUTAGE, OWNER, READ, Violation, Violations
from tests.drill.writers import Writer
from tiers.model.segment_metadata import RemoteLogSegmentState as State

_OPEN_S = 60.0
_HEAL_S = 90.0
_LAST_READ_S = 120.0


@dataclass(frozen=True, slots=True)
class DrillSettings:
    seed: int
    seconds: float
    records_per_s: float = 150.0
    readers: int = 2
    with_broker: bool = True
    faults: Sequence[Fault] | None = None
    """The faults. None: the plan of the seed."""
    stop_at_first: bool = False
    """Whether the drill ends at the first broken invariant."""
    owner_back_s: float = OWNER_BACK_S
    """The longest time that a metadata partition may have no owner after the last disruption."""


@dataclass(frozen=True, slots=True)
class DrillResult:
    seed: int
    seconds: float
    faults: Counter[FaultKind]
    produced: int
    certain: int
    aborted: int
    deletions: int
    checked: int
    passes: int
    unfinished_passes: int
    longest_wait_s: float
    segments: Counter[State]
    duplicates: int
    left_over: int
    trimmed_offsets: int
    transactions: int
    audits: int
    probes: int
    slowest_probe_s: float
    without_owner_s: dict[int, float]
    without_owner_quiet_s: dict[int, float]
    rules: Counter[str]
    violations: list[Violation] = field(default_factory=list)

    @property
    def has_held(self) -> bool:
        return not self.rules


class _Worker(Protocol):
    error: str | None

    def run(self) -> None: ...

    def stop(self) -> None: ...


class DrillError(Exception):
    """The drill itself failed."""


class Drill:
    def __init__(self, rig: DrillRig, settings: DrillSettings, say: Callable[[str], None] = lambda text: None) -> None:
        self._rig = rig
        self._settings = settings
        self._say = say
        self._began_s = 0.0
        self.violations = Violations()
        self.acknowledged = AcknowledgedRecords(rig.topics.places, self.violations)
        self.audit = TierAudit(rig, self.acknowledged, self.violations)
        self.watch = ProxyWatch(rig, self.violations, settings.owner_back_s)
        seed, rate = settings.seed, settings.records_per_s / 2
        self.writers = [
            Writer(
                rig, self.acknowledged, topic, seed + number, records_per_s=rate, deletes=topic == rig.topics.expiring
            )
            for number, topic in enumerate(rig.topics.names)
        ]
        self.readers = [
            Reader(rig, self.acknowledged, self.audit.model, self.violations, seed + 100 + number)
            for number in range(settings.readers)
        ]
        self.probe = OutageProbe(rig, self.acknowledged, self.violations)
        self._heal = threading.Event()
        self._injected: Counter[FaultKind] = Counter()
        self._fault_errors: list[str] = []

    def run(self) -> DrillResult:
        """Runs the drill on a started rig whose topics exist. Raises `DrillError` when the drill itself fails."""
        with _thread(self.audit.run, self.audit.stop), _thread(self.watch.run, self.watch.stop):
            if not self.audit.opened.wait(_OPEN_S):
                raise DrillError(self.audit.error or f"the audit was not opened in {_OPEN_S:.0f} s")
            self._began_s = time.monotonic()
            with self._load():
                self._inject()
            self._settle()
            self._read_everything()
        if trouble := self._trouble():
            raise DrillError("; ".join(trouble))
        return self._result()

    @contextmanager
    def _load(self) -> Iterator[None]:
        workers: list[_Worker] = [*self.readers, *self.writers, self.probe]
        threads = [_started(each.run) for each in workers]
        try:
            yield
        finally:
            for each in workers:
                each.stop()
            for thread in threads:
                thread.join()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _inject(self) -> None:
        settings = self._settings
        faults = settings.faults
        if faults is None:
            faults = plan(settings.seed, settings.seconds, len(self._rig.proxies), with_broker=settings.with_broker)
        under_way: list[threading.Thread] = []
        try:
            for fault in faults:
                if not self._wait_until(fault.at_s):
                    break
                self._say(f"{self._elapsed_s():6.1f} s  {fault}")
                self._injected[fault.kind] += 1
                under_way.append(_started(self._apply, fault))
            self._wait_until(settings.seconds)
        finally:
            self._heal.set()
            for thread in under_way:
                thread.join()

    def _apply(self, fault: Fault) -> None:
        try:
            self._rig.apply(fault, self._heal)
        except Exception as error:
            self._fault_errors.append(f"{fault}: {error!r}")
            raise

    def _wait_until(self, at_s: float) -> bool:
        """Waits. Returns False when the drill ends before `at_s`."""
        while self._elapsed_s() < at_s:
            if self._trouble() or (self._settings.stop_at_first and self.violations.total):
                return False
            time.sleep(0.1)
        return True

    def _trouble(self) -> list[str]:
        workers: list[_Worker] = [self.audit, self.watch, self.probe, *self.writers, *self.readers]
        said = [each.error for each in workers]
        return [*self._fault_errors, *(one for one in said if one is not None)]

    def _settle(self) -> None:
        """Waits until every metadata partition has an owner and every certain record is in the remote tier."""
        deadline_s = time.monotonic() + _HEAL_S
        while (not self.watch.is_all_owned or self._behind()) and not self._trouble():
            if time.monotonic() > deadline_s:
                if not self.watch.is_all_owned:
                    self.violations.add(
                        OWNER, f"a metadata partition has no owner {_HEAL_S:.0f} s after the last fault"
                    )
                for place in self._behind():
                    self.violations.add(OUTAGE, f"{place} is not copied {_HEAL_S:.0f} s after the last fault")
                return
            time.sleep(0.2)

    def _behind(self) -> list[Place]:
        """Returns the partitions whose last certain record is in no finished segment."""
        behind = []
        for place, model in list(self.audit.model.partitions.items()):
            certain = self.acknowledged[place].certain_from(0)
            ends = [segment.metadata.end_offset for segment in list(model.segments.values()) if segment.is_readable]
            if certain and max(ends, default=-1) < certain[-1]:
                behind.append(place)
        return behind

    def _read_everything(self) -> None:
        """Reads all certain records from the log start to the end, with one reader per proxy."""
        readers = [
            Reader(self._rig, self.acknowledged, self.audit.model, self.violations, self._settings.seed)
            for _ in self._rig.proxies
        ]

        def read(number: int) -> None:
            proxy = self._rig.proxies[number]
            for place in self._rig.topics.places:
                start = max(self.acknowledged[place].asked_start, self.audit.model.partitions[place].log_start)
                certain = self.acknowledged[place].certain_from(start)
                if certain and not readers[number].read(proxy, place, -2, certain, _LAST_READ_S):
                    self.violations.add(READ, f"{place} through {proxy.name}: not read to its end after the drill")

        threads = [_started(read, number) for number in range(len(readers))]
        for thread in threads:
            thread.join()
        self.readers += readers

    def _result(self) -> DrillResult:
        return DrillResult(
            seed=self._settings.seed,
            seconds=self._elapsed_s(),
            faults=self._injected,
            produced=sum(each.produced for each in self.writers),
            certain=self.acknowledged.count,
            aborted=self.acknowledged.aborted_count,
            deletions=sum(each.deletions for each in self.writers),
            checked=sum(each.checked for each in self.readers),
            passes=sum(each.passes for each in self.readers),
            unfinished_passes=sum(each.unfinished for each in self.readers),
            longest_wait_s=max(each.longest_wait_s for each in self.readers),
            segments=self.audit.model.counts,
            duplicates=self.audit.duplicates,
            left_over=self.audit.left_over,
            trimmed_offsets=self.audit.trimmed_offsets,
            transactions=self.audit.transactions,
            audits=self.audit.looks,
            probes=self.probe.tries,
            slowest_probe_s=self.probe.slowest_s,
            without_owner_s=self.watch.longest_s,
            without_owner_quiet_s=self.watch.longest_quiet_s,
            rules=self.violations.count,
            violations=self.violations.first(),
        )


def _started(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


@contextmanager
def _thread(work: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    thread = _started(work)
    try:
        yield
    finally:
        stop()
        thread.join()
