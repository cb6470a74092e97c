"""`Violations`: the broken invariants, with the time of their detection. Safe to use from any thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

KEPT = 200


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    """The name of the invariant, one of `RULES`."""
    what: str
    at_s: float
    """The time since the start of the drill."""


READ = "every acknowledged record is readable once and in order"
BYTES = "a read returns the bytes that were written"
ABORTED = "no aborted record is read"
DELETED = "no deleted record comes back"
LOG_START = "log starts never go back"
TRIM = "no record is trimmed before every proxy can read it remotely"
TRIM_OWNER = "no trim happens that an owner did not announce"
FENCED = "every commit proves the writer's membership"
SEGMENT = "a finished segment has the records of the log"
CHOICE = "finished segments agree at shared offsets"
STATES = "segments go through their states in order"
OBJECTS = "objects come after COPY_SEGMENT_STARTED and go after DELETE_SEGMENT_STARTED"
GAP = "a gap costs only records that clients deleted"
EXPIRY = "retention removes no more than its settings allow"
OWNER = "a metadata partition gets a new owner in time"
BOUNDS = "the bounds between the tiers hold"
OUTAGE = "an outage of the store does not affect the local tier"
RULES = (
    READ, BYTES, ABORTED, DELETED, LOG_START, TRIM, TRIM_OWNER, FENCED, SEGMENT, CHOICE, STATES, OBJECTS, GAP, EXPIRY,
    OWNER, BOUNDS, OUTAGE,
)  # fmt: skip


class Violations:
    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._lock = threading.Lock()
        self._first: list[Violation] = []
        self._seen: set[tuple[str, str]] = set()
        self.count: Counter[str] = Counter()

    def add(self, rule: str, what: str) -> None:
        """Adds a violation. A repeated violation does not count again."""
        with self._lock:
            if (rule, what) in self._seen:
                return
            self._seen.add((rule, what))
            self.count[rule] += 1
            if len(self._first) < KEPT:
                self._first.append(Violation(rule, what, self._clock_s() - self._began_s))

    @property
    def total(self) -> int:
        return sum(self.count.values())

    def first(self) -> list[Violation]:
        with self._lock:
            return list(self._first)
