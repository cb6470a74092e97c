"""`ProcessReport`: what one process of the proxy counts, and `History`: the reports of the last hour.

The process that serves the page takes a report of every process each 15 s. The history is in memory and bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Final

from proxy.admin.facts import EventLine, HistoryFacts, RaisedAlarm, Series, StoreFacts, WaitingRead
from proxy.metrics import LATENCY_BUCKETS_S

INTERVAL_MS: Final = 15_000
RECENT_MS: Final = 300_000
SAMPLES: Final = 241
"""One hour, and the sample before it."""
_NO_LATENCIES: Final = (0,) * (len(LATENCY_BUCKETS_S) + 1)


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters since the process started. Latencies are the counts of the buckets of `LATENCY_BUCKETS_S`."""

    local_fetches: tuple[int, ...] = _NO_LATENCIES
    remote_fetches: tuple[int, ...] = _NO_LATENCIES
    local_bytes: int = 0
    remote_bytes: int = 0
    copied_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0

    def since(self, earlier: Counts) -> Counts:
        """Returns what was counted since `earlier`, of the same process."""
        return Counts(
            tuple(new - old for new, old in zip(self.local_fetches, earlier.local_fetches, strict=True)),
            tuple(new - old for new, old in zip(self.remote_fetches, earlier.remote_fetches, strict=True)),
            *(getattr(self, name) - getattr(earlier, name) for name in _SCALARS),
        )

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            tuple(map(sum, zip(self.local_fetches, other.local_fetches, strict=True))),
            tuple(map(sum, zip(self.remote_fetches, other.remote_fetches, strict=True))),
            *(getattr(self, name) + getattr(other, name) for name in _SCALARS),
        )


_SCALARS: Final = tuple(each.name for each in fields(Counts) if each.name not in ("local_fetches", "remote_fetches"))


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """The calls of one process to a store. `reads` are the counts of the buckets of a histogram, `bounds_s` its
    bounds."""

    store: str
    requests: int
    errors: int
    in_flight: int
    bounds_s: tuple[float, ...] = ()
    reads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """A report of one process. `backlog_bytes` is None in a process that copies nothing."""

    pid: int
    rss_bytes: int | None = None
    connections: int | None = None
    backlog_bytes: int | None = None
    counts: Counts = Counts()
    stores: tuple[StoreCounts, ...] = ()
    alarms: tuple[RaisedAlarm, ...] = ()
    """Those about the process itself."""
    waiting: tuple[WaitingRead, ...] = ()
    events: tuple[EventLine, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """The reports of all processes at one time, by the names of the processes."""

    at_ms: int
    reports: Mapping[str, ProcessReport]


class History:
    """The samples of the last hour, the oldest first."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples: deque[Sample] = deque(maxlen=samples)

    def add(self, at_ms: int, reports: Mapping[str, ProcessReport]) -> None:
        self._samples.append(Sample(at_ms, reports))

    def facts(self) -> HistoryFacts:
        steps = [(later.at_ms, max(1, later.at_ms - earlier.at_ms), _between(earlier, later), later)
                 for earlier, later in pairwise(self._samples)]  # fmt: skip

        def series(name: str, unit: str, value: Callable[[int, Counts, Sample], float | None]) -> Series:
            return Series(name, unit, tuple(value(ms, counts, sample) for _, ms, counts, sample in steps))  # type: ignore[arg-type]  # one of the units

        return HistoryFacts(
            INTERVAL_MS,
            tuple(at_ms for at_ms, *_ in steps),
            (
                series("local_p50", "ms", lambda _, counts, __: percentile_ms(counts.local_fetches, 0.5)),
                series("local_p99", "ms", lambda _, counts, __: percentile_ms(counts.local_fetches, 0.99)),
                series("remote_p50", "ms", lambda _, counts, __: percentile_ms(counts.remote_fetches, 0.5)),
                series("remote_p99", "ms", lambda _, counts, __: percentile_ms(counts.remote_fetches, 0.99)),
                series("local_bytes", "B/s", lambda ms, counts, _: counts.local_bytes * 1000 / ms),
                series("remote_bytes", "B/s", lambda ms, counts, _: counts.remote_bytes * 1000 / ms),
                series("copied_bytes", "B/s", lambda ms, counts, _: counts.copied_bytes * 1000 / ms),
                series("backlog", "B", lambda _, __, sample: _backlog(sample.reports.values())),
                series("cache_hits", "%", lambda _, counts, __: _share(counts.cache_hits, counts.cache_misses)),
            ),
        )

    def stores(self, reports: Mapping[str, ProcessReport]) -> tuple[StoreFacts, ...]:
        """Adds up what the processes say of each store now, and compares it with some minutes ago."""
        earlier = next((each.reports for each in self._samples if each.at_ms >= self._recent_ms), {})
        names = dict.fromkeys(store.store for report in reports.values() for store in report.stores)
        return tuple(_store(name, reports, earlier) for name in names)

    @property
    def _recent_ms(self) -> int:
        return self._samples[-1].at_ms - RECENT_MS if self._samples else 0


def _store(name: str, reports: Mapping[str, ProcessReport], earlier: Mapping[str, ProcessReport]) -> StoreFacts:
    requests = errors = in_flight = recent_errors = 0
    reads: list[int] = []
    bounds_s: tuple[float, ...] = ()
    for process, report in reports.items():
        before = earlier.get(process)
        for store in report.stores:
            if store.store != name:
                continue
            old = next((each for each in before.stores if each.store == name), None) if before is not None else None
            is_same = before is not None and before.pid == report.pid
            requests += store.requests
            errors += store.errors
            in_flight += store.in_flight
            recent_errors += store.errors - (old.errors if old is not None and is_same else 0)
            if store.reads:
                base = old.reads if old is not None and is_same and old.reads else (0,) * len(store.reads)
                new = [later - first for later, first in zip(store.reads, base, strict=True)]
                reads = list(map(sum, zip(reads, new, strict=True))) if reads else new
                bounds_s = store.bounds_s
    return StoreFacts(
        store=name,
        requests=requests,
        errors=errors,
        in_flight=in_flight,
        recent_errors=recent_errors,
        read_p50_ms=percentile_ms(reads, 0.5, bounds_s) if reads else None,
        read_p99_ms=percentile_ms(reads, 0.99, bounds_s) if reads else None,
    )


def _between(earlier: Sample, later: Sample) -> Counts:
    """Adds up what all processes counted between two samples. A process that was restarted began at 0."""
    total = Counts()
    for name, report in later.reports.items():
        before = earlier.reports.get(name)
        is_same = before is not None and before.pid == report.pid
        total += report.counts.since(before.counts) if before is not None and is_same else report.counts
    return total


def _backlog(reports: Iterable[ProcessReport]) -> float | None:
    known = [report.backlog_bytes for report in reports if report.backlog_bytes is not None]
    return float(sum(known)) if known else None


def _share(hits: int, misses: int) -> float | None:
    return 100 * hits / (hits + misses) if hits + misses else None


def percentile_ms(counts: Sequence[int], share: float, bounds_s: Sequence[float] = LATENCY_BUCKETS_S) -> float | None:
    """Returns a percentile of a histogram, interpolated within its bucket; None without a value.

    A value above the last bound counts as that bound."""
    total = sum(counts)
    if total <= 0:
        return None
    cumulative = list(accumulate(counts))
    place = bisect_left(cumulative, share * total)
    if place >= len(bounds_s):
        return bounds_s[-1] * 1000
    below = cumulative[place - 1] if place else 0
    low = bounds_s[place - 1] if place else 0.0
    inside = (share * total - below) / max(1, counts[place])
    return (low + (bounds_s[place] - low) * inside) * 1000
