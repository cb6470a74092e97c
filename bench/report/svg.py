"""Builds SVG elements, and maps values to positions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Attribute = str | float | int | None


def element(tag: str, *children: str, **attributes: Attribute) -> str:
    """Returns an element. `class_` is the attribute `class`, and `_` in other names is `-`. None leaves one out.

    The children are markup already; `text` makes markup of a text."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>" if children else f"<{tag}{written}/>"


def _number(value: Attribute) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(x: float, y: float, content: str, *, class_: str = "label", anchor: str | None = None) -> str:
    return element("text", escape(content), x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def path(points: Iterable[tuple[float, float]], class_: str, *, closed: bool = False) -> str:
    """Returns a line through points. A point that is not a number interrupts it."""
    drawn, is_open = [], False
    for x, y in points:
        if math.isnan(x) or math.isnan(y):
            is_open = False
            continue
        drawn.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}")
        is_open = True
    return element("path", d=" ".join(drawn) + (" Z" if closed and drawn else ""), class_=class_)


def tooltip(content: str) -> str:
    return element("title", escape(content))


@dataclass(frozen=True, slots=True)
class Linear:
    """Maps `[low, high]` to the positions `[begin, end]`. A value beyond an end is drawn at that end."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def ticks(self, count: int = 5) -> list[float]:
        """Returns about `count` round values within the range."""
        if self.high <= self.low:
            return [self.low]
        rough = (self.high - self.low) / count
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """Maps `[low, high]`, both above 0, to positions by the logarithm."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        if math.isnan(value):
            return value
        inside = min(self.high, max(self.low, value))
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Returns the powers of ten within the range."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**exponent for exponent in range(first, last + 1)]


def log_range(values: Sequence[float]) -> tuple[float, float]:
    """Returns bounds for a logarithmic axis around positive values: 1, 2 or 5 times a power of ten, a decade apart."""
    found = [value for value in values if value > 0 and not math.isnan(value)]
    if not found:
        return 1.0, 10.0
    low, high = _round_down(min(found)), _round_up(max(found))
    return low, max(high, low * 10)


def _round_down(value: float) -> float:
    unit = 10.0 ** math.floor(math.log10(value))
    return max(unit * factor for factor in (1, 2, 5) if unit * factor <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    unit = 10.0 ** math.floor(math.log10(value))
    return min(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= value * (1 - 1e-9))


def shown(value: float) -> str:
    """Returns a number with about three digits, as a reader wants it: 0.42, 3.1, 12.5, 148, 12,500."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.2f}".removesuffix("0").removesuffix(".0")
