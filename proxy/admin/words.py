"""How the page writes numbers, sizes, times and names. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from proxy.admin.facts import Outage, Series, SettingLine, TopicSetting
from tiers.config.topic_settings import value_text
from tiers.texts import duration_text, size_text, three_digits

NOTHING: Final = "\N{EN DASH}"
_NARROW_SPACE: Final = "\N{NARROW NO-BREAK SPACE}"


def size(value: float | None) -> str:
    return NOTHING if value is None else size_text(value)


def rate(value: float | None) -> str:
    return NOTHING if value is None else f"{size(value)}/s"


def number(value: int | None) -> str:
    """Returns digits in groups of three."""
    return NOTHING if value is None else f"{value:,}".replace(",", _NARROW_SPACE)


def count(value: int, noun: str) -> str:
    """Returns a number with its noun, for example `1 topic` or `2 topics`."""
    return f"{number(value)} {noun}" if value == 1 else f"{number(value)} {noun}s"


def milliseconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{three_digits(value)} ms" if value < 1000 else f"{three_digits(value / 1000)} s"


def in_unit(series: Series, value: float | None) -> str:
    """Returns a value of a series of the history with its unit."""
    match series.unit:
        case "ms":
            return milliseconds(value)
        case "B/s":
            return rate(value)
        case "B":
            return size(value)
        case "%":
            return NOTHING if value is None else f"{value:.0f} %"


def duration(ms: float | None) -> str:
    """Returns the largest unit and the next one, for example `3 d 4 h`."""
    if ms is None:
        return NOTHING
    if ms < 1000:
        return "0 s" if ms <= 0 else "< 1 s"
    return duration_text(int(ms))


def age(at_ms: int | None, now_ms: int) -> str:
    return NOTHING if at_ms is None else duration(max(0, now_ms - at_ms))


def moment(at_ms: int | None) -> str:
    """Returns a time in UTC, to the second."""
    if at_ms is None or at_ms < 0:
        return NOTHING
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return str(at_ms)


def in_units(setting: SettingLine) -> str:
    """Returns the number of a setting with its unit, by the end of its key; empty if it has none or is not a number."""
    if not setting.value.isdecimal():
        return ""
    value = int(setting.value)
    match setting.key.split("."):
        case [*_, "ms"]:
            return duration(value) if value >= 1000 else f"{value} ms"
        case [*_, "seconds"]:
            return duration(value * 1000)
        case [*_, "bytes"]:
            return size(value)
        case [*_, "bytes", "per", "second"]:
            return rate(value)
    return ""


def since(at_ms: int | None, now_ms: int) -> str:
    """Returns a time as `since 07:55:12 UTC`, with the day if it is another one than today; empty if it is unknown."""
    if at_ms is None:
        return ""
    day, _, time = moment(at_ms).partition(" ")
    return f"since {time}" if moment(now_ms).startswith(day) else f"since {day} {time}"


def outage_title(outage: Outage, now_ms: int) -> str:
    """Returns what does not answer, why and since when."""
    return f"{outage.what}: {outage.reason} {since(outage.since_ms, now_ms)}".rstrip()


def outage_effects(outage: Outage, now_ms: int) -> list[str]:
    """Returns what the outage does to clients and to copying, one sentence each."""
    found = []
    if outage.clients:
        verb = "waits" if outage.clients == 1 else "wait"
        found.append(f"{count(outage.clients, 'client')} {verb} {since(outage.clients_since_ms, now_ms)}")
    if outage.partitions:
        found.append(f"the copying of {count(outage.partitions, 'partition')} waits")
    if outage.alarm == "no-broker-answers" and outage.reason != "not in the cluster":
        found.insert(0, "clients reach no broker")
    return found


def outage_lines(outage: Outage, now_ms: int) -> list[str]:
    """Returns an outage for a terminal: its title, its effects, and the alarms that follow from it."""
    effects = [f"  {each}" for each in outage_effects(outage, now_ms)]
    return [outage_title(outage, now_ms), *effects, *(f"  {each.name}: {each.about}" for each in outage.consequences)]


def percent(part: float, whole: float) -> str:
    """Returns a share for an SVG attribute."""
    return f"{100 * part / whole if whole else 0:.3f}%"


def value_of(setting: TopicSetting) -> str:
    """Returns the value of a topic's setting as a person reads it."""
    return value_text(setting.key, setting.value) or NOTHING
