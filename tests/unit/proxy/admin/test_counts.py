"""The history of the last hour: what was counted between two samples, in bounded memory."""

from __future__ import annotations

import pytest

from proxy.admin.counts import Counts, History, ProcessReport, StoreCounts, percentile_ms
from proxy.admin.facts import Series
from proxy.metrics import LATENCY_BUCKETS_S

NO = (0,) * (len(LATENCY_BUCKETS_S) + 1)


def latencies(**counts: int) -> tuple[int, ...]:
    """Returns a histogram with counts in the buckets that end at the given milliseconds."""
    found = list(NO)
    for name, count in counts.items():
        found[LATENCY_BUCKETS_S.index(float(name.removeprefix("ms").replace("_", ".")) / 1000)] = count
    return tuple(found)


def series(history: History, name: str) -> Series:
    return next(each for each in history.facts().series if each.name == name)


def test_a_percentile_lies_within_its_bucket() -> None:
    assert percentile_ms(NO, 0.5) is None
    assert percentile_ms(latencies(ms1=100), 0.5) == 0.75
    assert percentile_ms(latencies(ms1=99, ms100=1), 0.99) == 1.0
    assert percentile_ms((*NO[:-1], 5), 0.5) == LATENCY_BUCKETS_S[-1] * 1000


def test_the_history_shows_what_happened_between_two_samples() -> None:
    history = History()
    first = Counts(latencies(ms1=50), NO, 1_000, 10, 5, 1, 1)
    second = Counts(latencies(ms1=50, ms10=10), NO, 31_000, 1_510, 305, 4, 2)
    history.add(0, {"tidegate": ProcessReport(1, counts=first, backlog_bytes=70)})
    history.add(15_000, {"tidegate": ProcessReport(1, counts=second, backlog_bytes=90)})
    assert series(history, "local_p50").values == (7.5,)
    assert series(history, "remote_p50").values == (None,)
    assert series(history, "local_bytes").values == (2_000.0,)
    assert series(history, "remote_bytes").values == (100.0,)
    assert series(history, "copied_bytes").values == (20.0,)
    assert series(history, "cache_hits").values == (75.0,)
    assert series(history, "backlog").values == (90.0,)


def test_a_process_that_was_restarted_counts_from_zero() -> None:
    history = History()
    before = {
        "a": ProcessReport(1, counts=Counts(local_bytes=900)),
        "b": ProcessReport(2, counts=Counts(local_bytes=50)),
    }
    after = {"a": ProcessReport(7, counts=Counts(local_bytes=30)), "b": ProcessReport(2, counts=Counts(local_bytes=65))}
    history.add(0, before)
    history.add(1_000, after)
    assert series(history, "local_bytes").values == (45.0,)


def test_the_history_keeps_an_hour_and_no_more() -> None:
    history = History()
    for number in range(500):
        history.add(number * 15_000, {"a": ProcessReport(1)})
    facts = history.facts()
    assert len(facts.times_ms) == 240
    assert facts.times_ms[-1] - facts.times_ms[0] == 239 * 15_000


def test_a_store_shows_its_errors_of_the_last_minutes() -> None:
    def report(requests: int, errors: int, reads: tuple[int, ...]) -> ProcessReport:
        return ProcessReport(1, stores=(StoreCounts("s3", requests, errors, 1, (0.01, 0.1), reads),))

    history = History()
    history.add(0, {"a": report(10, 10, (10, 0, 0))})
    history.add(400_000, {"a": report(20, 12, (10, 4, 0))})
    history.add(500_000, {"a": report(25, 12, (10, 8, 0))})
    (store,) = history.stores({"a": report(30, 15, (10, 8, 0)), "b": report(5, 1, (0, 0, 0))})
    assert (store.requests, store.errors, store.in_flight) == (35, 16, 2)
    assert store.recent_errors == 3 + 1
    assert store.read_p50_ms == pytest.approx(55.0)
