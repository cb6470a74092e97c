"""Writes sizes, durations, times and names for people. The values of programs are in JSON and metrics."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

_SIZE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DURATION_UNITS_S: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def size_text(size_bytes: float) -> str:
    """Returns a size with three digits and its unit, such as `1.50 MiB`."""
    number, unit = float(size_bytes), 0
    while round(abs(number)) >= 1024 and unit < len(_SIZE_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{three_digits(number) if unit else int(number)} {_SIZE_UNITS[unit]}"


def duration_text(ms: int) -> str:
    """Returns a duration with its largest unit and the next one, such as `2 d 3 h`."""
    if ms < 0:
        return f"-{duration_text(-ms)}"
    if ms < 1000:
        return f"{ms} ms"
    rest_s, parts = ms // 1000, list[tuple[int, str]]()
    for unit, length_s in _DURATION_UNITS_S:
        count, rest_s = divmod(rest_s, length_s)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count)


def moment_text(time_ms: int) -> str:
    """Returns a time in UTC, with seconds."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"


def three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the nearest of the `known` ones, or "" if none is near."""
    names = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(given.lower(), names, 1, 0.6)
    return f"; did you mean {names[nearest[0]]}?" if nearest else ""
