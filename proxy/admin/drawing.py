"""The geometry of the page's drawings: the bounds of a partition, and sparklines. Pure: numbers in, coordinates out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proxy.admin.facts import PartitionPage, SegmentState, Series

_LEAST_SHARE: Final = 0.09
"""The least share of the width for the offsets between two bounds, so that each of them can be seen."""
SPARK_WIDTH: Final = 240
SPARK_HEIGHT: Final = 40
KINDS: Final = ("remote", "both", "local", "unstable", "copying", "deleting", "cut", "void", "gap")
"""The kinds of boxes in a drawing. The page has a colour and a word for each."""


@dataclass(frozen=True, slots=True)
class Box:
    """A run of offsets. `x` and `width` are percent of the drawing. `kind` names its colour, as in the bars."""

    x: float
    width: float
    kind: SegmentState | str
    title: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A bound, or several at one offset. `anchor` is the side on which its name stands.

    `letters` are those of the bounds in docs/founding.md."""

    x: float
    names: str
    letters: str
    offset: int
    anchor: str


@dataclass(frozen=True, slots=True)
class BoundsDrawing:
    """`is_to_scale`: whether equal widths are equal numbers of offsets."""

    remote: tuple[Box, ...]
    local: tuple[Box, ...]
    gaps: tuple[Box, ...]
    marks: tuple[Mark, ...]
    is_to_scale: bool

    @property
    def kinds(self) -> list[str]:
        """The colours of the drawing, in the order of the legend."""
        drawn = {box.kind for box in (*self.remote, *self.local, *self.gaps)}
        return [kind for kind in KINDS if kind in drawn]


class _Scale:
    """Maps offsets to percent, piece by piece between `stops`."""

    def __init__(self, stops: Sequence[int]) -> None:
        self._stops = sorted(set(stops))
        lengths = [later - earlier for earlier, later in zip(self._stops, self._stops[1:], strict=False)]
        whole = sum(lengths) or 1
        shares = [max(length / whole, _LEAST_SHARE) for length in lengths]
        self.is_even = all(length / whole >= _LEAST_SHARE for length in lengths)
        total = sum(shares) or 1
        self._at = [0.0]
        for share in shares:
            self._at.append(self._at[-1] + 100 * share / total)

    def x(self, offset: int) -> float:
        stops = self._stops
        if offset <= stops[0] or len(stops) == 1:
            return 0.0
        for place in range(1, len(stops)):
            if offset <= stops[place]:
                inside = (offset - stops[place - 1]) / (stops[place] - stops[place - 1])
                return self._at[place - 1] + (self._at[place] - self._at[place - 1]) * inside
        return 100.0


def bounds_drawing(page: PartitionPage) -> BoundsDrawing | None:
    """Returns None for a partition of which no offset is known."""
    line = page.line
    named = [
        ("log start", "", line.log_start_offset),
        ("remote first", "Rx", line.remote_start),
        ("local first", "Lx", line.local_start),
        ("remote last", "Ry", None if line.remote_end is None else line.remote_end + 1),
        ("LSO", "Ly", line.last_stable_offset),
        ("HW", "Lz", line.high_watermark),
    ]
    bounds = [(name, letters, offset) for name, letters, offset in named if offset is not None]
    ends = [end for span in page.shape for end in (span.start, span.end)]
    if not bounds and not ends:
        return None
    stops = [offset for *_, offset in bounds] + ([min(ends), max(ends)] if ends else [])
    scale = _Scale(stops)

    def box(start: int, end: int, kind: str, title: str) -> Box:
        x = scale.x(start)
        return Box(round(x, 3), round(max(scale.x(end) - x, 0.15), 3), kind, title)

    def text(start: int, end: int) -> str:
        return f"offsets {start} to {end - 1}"

    local_start = line.high_watermark if line.local_start is None else line.local_start
    remote: list[Box] = []
    for span in page.shape:
        title = f"{text(span.start, span.end)}, {span.state}, {_segments(span.segments)}"
        if span.state == "remote" and local_start is not None and local_start < span.end:
            middle = max(span.start, local_start)
            remote += [box(span.start, middle, "remote", title)] if span.start < middle else []
            remote.append(box(middle, span.end, "both", title))
        else:
            remote.append(box(span.start, span.end, span.state, title))
    local: list[Box] = []
    if line.local_start is not None and line.high_watermark is not None and line.last_stable_offset is not None:
        stable = max(line.local_start, line.last_stable_offset)
        remote_next = 0 if line.remote_end is None else line.remote_end + 1
        middle = min(max(line.local_start, remote_next), stable)
        if middle > line.local_start:
            title = f"{text(line.local_start, middle)}, in both tiers"
            local.append(box(line.local_start, middle, "both", title))
        if stable > middle:
            local.append(box(middle, stable, "local", f"{text(middle, stable)}, on the broker alone"))
        if line.high_watermark > stable:
            title = f"{text(stable, line.high_watermark)}, in open transactions"
            local.append(box(stable, line.high_watermark, "unstable", title))
    gaps = tuple(
        box(gap.first_offset, gap.next_offset, "gap", f"{text(gap.first_offset, gap.next_offset)}, in neither tier")
        for gap in page.gaps
    )
    return BoundsDrawing(tuple(remote), tuple(local), gaps, _marks(bounds, scale), scale.is_even)


def _segments(count: int) -> str:
    return "1 segment" if count == 1 else f"{count} segments"


def _marks(bounds: Sequence[tuple[str, str, int]], scale: _Scale) -> tuple[Mark, ...]:
    marks = []
    for offset in sorted({offset for *_, offset in bounds}):
        x = scale.x(offset)
        anchor = "start" if x < 8 else "end" if x > 92 else "middle"
        names = ", ".join(name for name, _, at in bounds if at == offset)
        letters = " ".join(letters for _, letters, at in bounds if at == offset and letters)
        marks.append(Mark(round(x, 3), names, letters, offset, anchor))
    return tuple(marks)


@dataclass(frozen=True, slots=True)
class Sparkline:
    """`line` and `area` are the path data in a box of `SPARK_WIDTH` by `SPARK_HEIGHT`. `last` is the newest value."""

    line: str
    area: str
    last: float | None
    highest: float | None


def sparkline(series: Series, ceiling: float | None = None) -> Sparkline:
    """Returns one line for the values, with a hole where there are none. `ceiling` is the highest value of the axis.

    The width is the time of all values, which is an hour or the age of the process."""
    values = series.values
    known = [value for value in values if value is not None]
    top = max([ceiling or 0.0, *known]) or 1.0
    step = SPARK_WIDTH / max(1, len(values) - 1)
    runs: list[list[tuple[float, float]]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            if runs[-1]:
                runs.append([])
        else:
            runs[-1].append((place * step, (SPARK_HEIGHT - 1) - (SPARK_HEIGHT - 3) * value / top))
    drawn = [run if len(run) > 1 else [(run[0][0] - 1, run[0][1]), (run[0][0] + 1, run[0][1])] for run in runs if run]
    line = " ".join("M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in run) for run in drawn)
    area = " ".join(
        f"M{run[0][0]:.1f},{SPARK_HEIGHT} L"
        + " L".join(f"{x:.1f},{y:.1f}" for x, y in run)
        + f" L{run[-1][0]:.1f},{SPARK_HEIGHT} Z"
        for run in drawn
    )
    return Sparkline(line, area, values[-1] if values else None, max(known, default=None))
