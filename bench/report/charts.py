"""The pictures of the report. Each function takes plain values and returns the content of one SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.measure.statistics import Spread
from bench.report.style import chart_css, key_of, variables
from bench.report.svg import Linear, Logarithmic, element, line, log_range, path, shown, text, tooltip

WIDTH = 1064.0
LETTER_WIDTH = 7.0
"""About the mean width of a letter of a legend."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The content of an SVG, and its size. `title` is what a screen reader says."""

    title: str
    width: float
    height: float
    content: str

    def inline(self) -> str:
        """Returns the picture for a page that has `chart_css`."""
        return self._svg(self.content)

    def file(self) -> str:
        """Returns the picture as a file of its own, with its title. It follows its reader's setting, light or dark."""
        margin, heading = 24.0, 40.0
        width, height = self.width + 2 * margin, self.height + 2 * margin + heading
        style = element("style", variables() + chart_css())
        back = element("rect", width=width, height=height, rx=14, class_="back")
        title = text(margin, margin + 16, self.title, class_="head")
        inner = element("g", self.content, transform=f"translate({margin:.0f} {margin + heading:.0f})")
        return self._svg(style + back + title + inner, width, height) + "\n"

    def _svg(self, content: str, width: float = 0.0, height: float = 0.0) -> str:
        return element(
            "svg",
            tooltip(self.title),
            content,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width or self.width:.0f} {height or self.height:.0f}",
            role="img",
        )


@dataclass(frozen=True, slots=True)
class Bar:
    way: str
    value: Spread
    note: str = ""
    """A few words behind the value."""


def bars(title: str, groups: Mapping[str, Sequence[Bar]], unit: str, *, label_width: float = 190.0) -> Picture:
    """Draws horizontal bars in groups. A bar is a median, its whisker goes from the least to the greatest round."""
    bar, gap, between = 20.0, 5.0, 20.0
    right = 150.0
    highest = max((one.value.greatest for group in groups.values() for one in group if one.value.rounds), default=1.0)
    way_width = 128.0
    scale = Linear(0.0, highest, label_width + way_width, WIDTH - right)
    drawn: list[str] = []
    y = 6.0
    for label, group in groups.items():
        present = [one for one in group if one.value.rounds]
        if not present:
            continue
        height = len(present) * (bar + gap) - gap
        drawn.append(text(0, y + height / 2 + 4, label, class_="title"))
        for one in present:
            end = scale(one.value.median)
            said = f"{one.way}, {label}: {shown(one.value.median)} {unit}"
            said += f" ({shown(one.value.least)} to {shown(one.value.greatest)} in {one.value.rounds} rounds)"
            drawn.append(text(label_width + way_width - 10, y + bar / 2 + 4, one.way, class_="soft", anchor="end"))
            rect = element(
                "rect",
                tooltip(said),
                x=scale.begin,
                y=y,
                width=max(1.5, end - scale.begin),
                height=bar,
                rx=3,
                class_="fill",
            )
            drawn.append(element("g", rect, class_=f"w-{key_of(one.way)}"))
            if one.value.rounds > 1:
                drawn.append(_whisker(scale(one.value.least), scale(one.value.greatest), y + bar / 2))
            behind = scale(one.value.greatest if one.value.rounds > 1 else one.value.median) + 8
            value = element("tspan", shown(one.value.median), class_="value")
            note = element("tspan", f"  {one.note}", class_="soft") if one.note else ""
            drawn.append(element("text", value, note, x=behind, y=y + bar / 2 + 4))
            y += bar + gap
        y += between - gap
        drawn.append(line(0, y - between / 2, WIDTH, y - between / 2, "grid"))
    several = any(one.value.rounds > 1 for group in groups.values() for one in group)
    legend = f"{unit}; the whiskers are the least and the greatest round" if several else unit
    drawn.append(text(WIDTH, y + 4, legend, class_="soft", anchor="end"))
    return Picture(title, WIDTH, y + 12, "".join(drawn))


def _whisker(begin: float, end: float, y: float) -> str:
    ends = "".join(line(x, y - 4, x, y + 4, "whisker") for x in (begin, end))
    return line(begin, y, end, y, "whisker") + ends


@dataclass(frozen=True, slots=True)
class Curve:
    """The quantiles of a latency: 101 values, from the least to the greatest, in milliseconds."""

    name: str
    way: str
    quantiles: Sequence[float]
    dashed: bool = False
    thin: bool = False

    @property
    def style(self) -> str:
        return f"stroke{' dash' * self.dashed}{' thin' * self.thin}"


def cumulative(title: str, curves: Sequence[Curve], unit: str = "ms") -> Picture:
    """Draws for each curve which share of the samples was not slower than a time."""
    height, left, top, bottom = 300.0, 56.0, 12.0, 36.0
    right = 60.0 + LETTER_WIDTH * max(len("p50 0.123, p99 0.123 ms"), *(len(curve.name) for curve in curves))
    low, high = log_range([value for curve in curves for value in curve.quantiles])
    x = Logarithmic(low, high, left, WIDTH - right)
    y = Linear(0.0, 1.0, height - bottom, top)
    drawn = [line(left, y(share), WIDTH - right, y(share), "grid") for share in (0, 0.25, 0.5, 0.75, 1)]
    drawn += [text(left - 8, y(share) + 4, f"{share:.0%}", class_="soft", anchor="end") for share in (0, 0.5, 1)]
    drawn += _log_axis(x, top, height - bottom, unit)
    for curve in curves:
        points = [(x(value), y(index / 100)) for index, value in enumerate(curve.quantiles)]
        dots = "".join(_dot(*points[q], f"{curve.name}: p{q} {shown(curve.quantiles[q])} {unit}") for q in (50, 99))
        drawn.append(element("g", path(points, curve.style), dots, class_=f"w-{key_of(curve.way)}"))
    legend, y_label = WIDTH - right + 22, top + 8.0
    for curve in curves:
        sample = line(legend, y_label - 4, legend + 24, y_label - 4, curve.style)
        drawn.append(element("g", sample, class_=f"w-{key_of(curve.way)}"))
        drawn.append(text(legend + 32, y_label, curve.name))
        values = f"p50 {shown(curve.quantiles[50])}, p99 {shown(curve.quantiles[99])} {unit}"
        drawn.append(text(legend + 32, y_label + 15, values, class_="soft"))
        y_label += 38
    return Picture(title, WIDTH, max(height, y_label), "".join(drawn))


def _dot(x: float, y: float, said: str, radius: float = 4.5) -> str:
    return element("circle", tooltip(said), cx=x, cy=y, r=radius, class_="dot")


def _log_axis(x: Logarithmic, top: float, bottom: float, unit: str) -> list[str]:
    drawn = []
    for tick in x.ticks():
        drawn.append(line(x(tick), top, x(tick), bottom, "grid"))
        drawn.append(text(x(tick), bottom + 18, f"{shown(tick)} {unit}", class_="soft", anchor="middle"))
    return drawn


@dataclass(frozen=True, slots=True)
class TimelinePanel:
    """One column of the timeline: what the tail felt above, and how fast the backfills were below."""

    way: str
    note: str
    phases: Sequence[tuple[str, float, float, str]]
    """Label, begin and end in seconds, and a few words on the latency."""
    median_ms: Sequence[tuple[float, float]]
    worst_ms: Sequence[tuple[float, float]]
    backfill: Sequence[tuple[float, float]]
    rates: Sequence[str] = field(default_factory=list)
    """A few words on the throughput, for each phase."""


def timeline(title: str, panels: Sequence[TimelinePanel]) -> Picture:
    """Draws panels side by side, on the same axes."""
    left, gap, top = 60.0, 18.0, 84.0
    latency_height, rate_height, between = 210.0, 96.0, 34.0
    width = (WIDTH - left - gap * (len(panels) - 1)) / max(1, len(panels))
    low, high = log_range([value for panel in panels for _, value in (*panel.median_ms, *panel.worst_ms)])
    latency = Logarithmic(low, high, top + latency_height, top)
    fastest = max((rate for panel in panels for _, rate in panel.backfill), default=1.0) or 1.0
    rate_top = top + latency_height + between
    rate = Linear(0.0, fastest * 1.12, rate_top + rate_height, rate_top)
    drawn: list[str] = []
    for number, panel in enumerate(panels):
        begin = left + number * (width + gap)
        longest = max((end for _, _, end, _ in panel.phases), default=1.0)
        x = Linear(0.0, longest, begin, begin + width)
        drawn.append(_panel(panel, x, latency, rate))
    marks = [(latency(tick), tick) for tick in latency.ticks()] + [(rate(tick), tick) for tick in rate.ticks(3)]
    drawn += [text(left - 8, y + 4, shown(tick), class_="soft", anchor="end") for y, tick in marks]
    bottom = rate_top + rate_height
    drawn.append(text(0, top - 9, "p99, ms", class_="soft"))
    drawn.append(text(0, rate_top - 7, "MB/s", class_="soft"))
    seconds = max((end for panel in panels for _, _, end, _ in panel.phases), default=0.0)
    drawn.append(text(WIDTH, bottom + 22, f"each panel is {seconds:.0f} s", class_="soft", anchor="end"))
    return Picture(title, WIDTH, bottom + 32, "".join(drawn))


def _panel(panel: TimelinePanel, x: Linear, latency: Logarithmic, rate: Linear) -> str:
    top, bottom = latency.end, latency.begin
    drawn: list[str] = [
        text(x.begin, top - 68, panel.way, class_="way"),
        text(x.begin, top - 51, panel.note, class_="soft"),
    ]
    for number, (label, begin, end, words) in enumerate(panel.phases):
        if number % 2 == 0:
            for low, high in ((bottom, top), (rate.begin, rate.end)):
                rect = element("rect", x=x(begin), y=high, width=x(end) - x(begin), height=low - high, class_="band")
                drawn.append(rect)
        middle = (x(begin) + x(end)) / 2
        drawn.append(text(middle, top - 27, label, class_="soft", anchor="middle"))
        drawn.append(text(middle, top - 9, words, class_="value", anchor="middle"))
        if number < len(panel.rates):
            drawn.append(text(middle, rate.end - 7, panel.rates[number], class_="value", anchor="middle"))
    drawn += [line(x.begin, latency(tick), x.end, latency(tick), "grid") for tick in latency.ticks()]
    drawn += [line(x.begin, rate(tick), x.end, rate(tick), "grid") for tick in rate.ticks(3)]
    upper = [(x(at), latency(value)) for at, value in panel.worst_ms]
    lower = [(x(at), latency(value)) for at, value in panel.median_ms]
    rates = [(x(at), rate(value)) for at, value in panel.backfill]
    drawn.append(path([*upper, *reversed(lower)], "area strong", closed=True))
    drawn.append(path(upper, "stroke thin"))
    drawn.append(path(lower, "stroke"))
    if rates:
        closed = [(rates[0][0], rate.begin), *rates, (rates[-1][0], rate.begin)]
        drawn.append(path(closed, "area strong", closed=True))
        drawn.append(path(rates, "stroke"))
    drawn.append(line(x.begin, bottom, x.end, bottom, "axis"))
    drawn.append(line(x.begin, rate.begin, x.end, rate.begin, "axis"))
    return element("g", *drawn, class_=f"w-{key_of(panel.way)}")


@dataclass(frozen=True, slots=True)
class Ladder:
    """The percentiles of one way at each step: p50, p99 and p99.9 in milliseconds."""

    way: str
    steps: Sequence[tuple[float, float, float]]


def ladders(title: str, steps: Sequence[str], ways: Sequence[Ladder]) -> Picture:
    """Draws p50 to p99.9 of every way, side by side at each step. The dot is the p99."""
    height, left, top, bottom = 270.0, 56.0, 14.0, 52.0
    found = [value for way in ways for step in way.steps for value in step]
    low, high = log_range(found)
    y = Logarithmic(low, high, height - bottom, top)
    width = (WIDTH - left) / max(1, len(steps))
    drawn = [line(left, y(tick), WIDTH, y(tick), "grid") for tick in y.ticks()]
    drawn += [text(left - 8, y(tick) + 4, f"{shown(tick)} ms", class_="soft", anchor="end") for tick in y.ticks()]
    for number, label in enumerate(steps):
        begin = left + number * width
        if number % 2 == 0:
            rect = element("rect", x=begin, y=top, width=width, height=height - bottom - top, class_="band")
            drawn.insert(0, rect)
        drawn.append(text(begin + width / 2, height - bottom + 20, label, anchor="middle"))
        for index, way in enumerate(ways):
            p50, p99, p999 = way.steps[number] if number < len(way.steps) else (math.nan,) * 3
            if math.isnan(p99):
                continue
            x = begin + width * (index + 1) / (len(ways) + 1)
            said = f"{way.way}, {label}: p50 {shown(p50)}, p99 {shown(p99)}, p99.9 {shown(p999)} ms"
            marks = [
                line(x, y(p50), x, y(p999), "bracket"),
                line(x - 6, y(p50), x + 6, y(p50), "bracket"),
                line(x - 6, y(p999), x + 6, y(p999), "bracket"),
                _dot(x, y(p99), said, 5.5),
                text(x + 11, y(p99) + 4, shown(p99), class_="value"),
            ]
            drawn.append(element("g", *marks, class_=f"w-{key_of(way.way)}"))
    x = left
    for way in ways:
        drawn.append(
            element(
                "g",
                element("rect", x=x, y=height - 18, width=12, height=12, rx=3, class_="fill"),
                class_=f"w-{key_of(way.way)}",
            )
        )
        drawn.append(text(x + 18, height - 8, way.way))
        x += 30 + 7.4 * len(way.way)
    drawn.append(text(WIDTH, height - 8, "from p50 to p99.9; the dot is the p99", class_="soft", anchor="end"))
    return Picture(title, WIDTH, height, "".join(drawn))
