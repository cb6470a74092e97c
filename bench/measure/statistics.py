"""Percentiles, medians and spreads of the figures of a run."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of all values do not exceed, or NaN if there are no values.

    `share` is above 0 and at most 1 (the nearest-rank method: the result is always one of the values)."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def quantiles(values: Sequence[float]) -> list[float]:
    """Returns the least value and the percentiles 1 to 100, or nothing if there are no values."""
    if not values:
        return []
    ordered = sorted(values)
    return [ordered[0], *(ordered[max(0, math.ceil(share * len(ordered) / 100) - 1)] for share in range(1, 101))]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several rounds, with the least and the greatest of them. NaN if there was no round."""

    median: float
    least: float
    greatest: float
    rounds: int


def spread(values: Iterable[float]) -> Spread:
    found = [each for each in values if not math.isnan(each)]
    if not found:
        return Spread(math.nan, math.nan, math.nan, 0)
    return Spread(statistics.median(found), min(found), max(found), len(found))


def by_slice(samples: Iterable[tuple[float, float]], slice_s: float) -> dict[int, list[float]]:
    """Groups pairs (seconds, value) into slices of time. Slice `n` has the times `[n * slice_s, (n + 1) * slice_s)`."""
    slices: dict[int, list[float]] = {}
    for at_s, value in samples:
        slices.setdefault(math.floor(at_s / slice_s), []).append(value)
    return dict(sorted(slices.items()))


def amount_between(progress: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Returns what was done in a span of time. `progress` are pairs of a time and the amount so far, in order.

    Between two reports, the amount grows on a straight line. Before the first report it is 0."""
    return _amount_at(progress, end_s) - _amount_at(progress, begin_s)


def _amount_at(progress: Sequence[tuple[float, float]], at_s: float) -> float:
    index = bisect.bisect_right(progress, at_s, key=lambda report: report[0])
    if index == 0:
        return 0.0
    before_s, before = progress[index - 1]
    if index == len(progress):
        return before
    after_s, after = progress[index]
    return before + (after - before) * (at_s - before_s) / (after_s - before_s)


def spread_begin(index: int) -> float:
    """Returns a share in `[0, 1)` that lies far from those of all lower indexes: 0, 1/2, 1/4, 3/4, 1/8, 5/8, ..."""
    share, unit = 0.0, 0.5
    while index:
        share += unit * (index & 1)
        index, unit = index >> 1, unit / 2
    return share
