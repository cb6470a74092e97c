"""Turns the result of each scenario into pictures and a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.measure.results import ScenarioResult, Timeline
from bench.measure.statistics import by_slice, percentile
from bench.report.charts import (
    Bar,
    Curve,
    Ladder,
    Picture,
    TimelinePanel,
    bars,
    cumulative,
    ladders,
    timeline,
)
from bench.report.svg import shown

SLICE_S = 0.2
HAPROXY = "haproxy"

COLUMNS = {
    "mib_per_s": "MiB/s",
    "mb_per_s": "MB/s",
    "rate_of_direct": "of the direct rate",
    "backfill_mb_per_s": "backfill MB/s",
    "server_cpu_s_per_gib": "server CPU s/GiB",
    "relay_cpu_s_per_gib": "relay CPU s/GiB",
    "tidegate_cpu_s_per_gib": "Tidegate CPU s/GiB",
    "broker_cpu_s_per_gib": "broker CPU s/GiB",
    "client_cpu_s_per_gib": "client CPU s/GiB",
    "store_cpu_s_per_gib": "store relay CPU s/GiB",
    "s3_cpu_s_per_gib": "S3 server CPU s/GiB",
    "consume_p50_ms": "consumed p50 ms",
    "consume_p99_ms": "p99 ms",
    "consume_p999_ms": "p99.9 ms",
    "produce_p50_ms": "produced p50 ms",
    "produce_p99_ms": "p99 ms",
    "produce_p999_ms": "p99.9 ms",
    "cpu_share": "cores",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "p999_ms": "p99.9 ms",
    "max_ms": "longest ms",
    "added_p50_ms": "added p50 ms",
    "added_p99_ms": "added p99 ms",
    "cpu_us_per_request": "CPU us a request",
    "relay_us_per_poll": "relay CPU us a poll",
    "broker_us_per_poll": "broker CPU us a poll",
    "polls_per_s": "polls/s",
    "kib_per_connection": "KiB a connection",
    "mib_before": "MiB before",
    "mib_after": "MiB with them",
    "relay_mib": "resident MiB",
    "tidegate_mib": "resident MiB",
    "first_byte_ms": "first byte ms",
    "times_as_fast": "times as fast",
}
"""The titles of the figures that tables show, in this order."""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    """The name of the picture's file."""
    picture: Picture
    caption: str


def figures_of(result: ScenarioResult) -> list[Figure]:
    """Returns the pictures of a scenario. A scenario without any has only its table."""
    draw = _DRAWN.get(result.name)
    return draw(result) if draw is not None and result.readings else []


def columns_of(result: ScenarioResult) -> list[str]:
    known = {name for one in result.readings for name in one.figures}
    return [name for name in COLUMNS if name in known]


def _grouped(
    result: ScenarioResult, cases: Sequence[str], figure: str, note: Callable[[str, str], str] = lambda case, way: ""
) -> dict[str, list[Bar]]:
    return {
        case: [
            Bar(way, value, note(case, way))
            for way in result.ways()
            if (value := result.spread(case, way, figure)).rounds
        ]
        for case in cases
    }


def _times(result: ScenarioResult, figure: str, of: str) -> Callable[[str, str], str]:
    """Returns a function that says how many times the figure of `of` a way has."""

    def note(case: str, way: str) -> str:
        base = result.spread(case, of, figure).median
        mine = result.spread(case, way, figure).median
        return "" if way == of or math.isnan(base) or not base else f"{shown(mine / base)} \u00d7 {of}"

    return note


def _tail(result: ScenarioResult) -> list[Figure]:
    cases, ways = result.cases(), result.ways()
    found: list[Figure] = []
    if result.timelines:
        chosen = [median_round(result, way, cases[-1]) for way in ways]
        panels = [_panel(result, one) for one in chosen if one is not None]
        picture = timeline("The latency at the tail, and the throughput of backfills, over time", panels)
        caption = (
            f"Above: milliseconds from producing a record to consuming it, in slices of {SLICE_S:g} s. The lower line "
            "is the median, the upper line is the slowest record. Below: what all backfilling consumers read together. "
            "Each panel is one round, the one with the median p99."
        )
        found.append(Figure("tail-and-backfill", picture, caption))
    for kind, what in (("consume", "produce to consume"), ("produce", "produce to acknowledgement")):
        lanes = [Ladder(way, [_percentiles(result, case, way, kind) for case in cases]) for way in ways]
        picture = ladders(f"Latency at the tail, {what}", cases, lanes)
        found.append(Figure(f"tail-{kind}", picture, f"From {what}, the medians of the rounds."))
    return found


def _percentiles(result: ScenarioResult, case: str, way: str, kind: str) -> tuple[float, float, float]:
    p50, p99, p999 = (result.spread(case, way, f"{kind}_{name}_ms").median for name in ("p50", "p99", "p999"))
    return p50, p99, p999


def median_round(result: ScenarioResult, way: str, case: str) -> Timeline | None:
    by_p99 = sorted(
        (one.figures["consume_p99_ms"], one.round) for one in result.readings if one.way == way and one.case == case
    )
    if not by_p99:
        return None
    number = by_p99[(len(by_p99) - 1) // 2][1]
    return next((one for one in result.timelines if one.way == way and one.round == number), None)


def _panel(result: ScenarioResult, of: Timeline) -> TimelinePanel:
    slices = by_slice([(at_s, consume_ms) for at_s, _, consume_ms in of.tail], SLICE_S)
    middle = {number: (number + 0.5) * SLICE_S for number in slices}
    phases, rates = [], []
    # A phase begins when its consumers do. So a band reaches from the end of the phase before it to its own end.
    begin = 0.0
    for phase in of.phases:
        within = [consume_ms for at_s, _, consume_ms in of.tail if phase.begin_s <= at_s < phase.end_s]
        rate = [mb_per_s for at_s, mb_per_s in of.backfill if phase.begin_s <= at_s < phase.end_s]
        label = "no backfill" if phase.consumers == 0 else f"{phase.consumers} backfill{'s' * (phase.consumers > 1)}"
        phases.append((label, begin, phase.end_s, shown(percentile(within, 0.99))))
        rates.append(shown(sum(rate) / len(rate)) if rate and phase.consumers else "")
        begin = phase.end_s
    return TimelinePanel(
        way=of.way,
        note=_NOTES.get(of.way, ""),
        phases=phases,
        median_ms=[(middle[number], percentile(values, 0.5)) for number, values in slices.items()],
        worst_ms=[(middle[number], max(values)) for number, values in slices.items()],
        backfill=of.backfill,
        rates=rates,
    )


_NOTES = {
    "broker": "backfills from its own log",
    "Tidegate": "backfills from the store, 60 ms away",
    "native KIP-405": "backfills from the store, 60 ms away",
}


def _first_record(result: ScenarioResult) -> list[Figure]:
    curves = [
        Curve(f"{way}, {case}", way, found, dashed=case.endswith("again"), thin="workers" in way)
        for case in result.cases()
        for way in result.ways()
        if (found := result.quantiles(case, way))
    ]
    caption = "The share of seeks whose first record came within a time. The dots are p50 and p99."
    return [Figure("first-record", cumulative("The time from a seek to the first record", curves), caption)]


def _backfill(result: ScenarioResult) -> list[Figure]:
    native = next((way for way in result.ways() if way.startswith("native")), "")

    def note(case: str, way: str) -> str:
        cpu = result.spread(case, way, "server_cpu_s_per_gib").median
        times = _times(result, "mib_per_s", native)(case, way) if native else ""
        return f"{times}{', ' if times else ''}{shown(cpu)} CPU s/GiB"

    labels = {"no store": "the broker's own log", "folder": "a folder", "near": "a store nearby", "far": "a far store"}
    groups = {labels.get(case, case): bar for case, bar in _grouped(result, result.cases(), "mib_per_s", note).items()}
    caption = (
        "One Java consumer with default settings reads one partition. The CPU seconds are those of the server that the "
        "consumer speaks to."
    )
    picture = bars("Backfill of one default consumer, by store", groups, "MiB/s")
    return [Figure("backfill", picture, caption)]


def _costs(figure: str, title: str, unit: str, caption: str, name: str) -> Callable[[ScenarioResult], list[Figure]]:
    def draw(result: ScenarioResult) -> list[Figure]:
        note = _times(result, figure, HAPROXY) if HAPROXY in result.ways() else lambda case, way: ""
        groups = _grouped(result, result.cases(), figure, note)
        return [Figure(name, bars(title, groups, unit), caption)]

    return draw


def _round_trip(result: ScenarioResult) -> list[Figure]:
    curves = [
        Curve(way, way, found)
        for case in result.cases()
        for way in result.ways()
        if (found := result.quantiles(case, way))
    ]
    caption = "The share of round trips that took no longer than a time. The dots are p50 and p99."
    return [Figure("round-trip", cumulative("Round trips of one record", curves), caption)]


_DRAWN: Mapping[str, Callable[[ScenarioResult], list[Figure]]] = {
    "tail_and_backfill": _tail,
    "first_record": _first_record,
    "backfill": _backfill,
    "pass_through": _costs(
        "relay_cpu_s_per_gib",
        "CPU seconds of the relay per GiB",
        "CPU s/GiB",
        "CPU seconds of all processes of the relay for each GiB of records, from the kernel. Less is better.",
        "pass-through",
    ),
    "round_trip": _round_trip,
    "copying": _costs(
        "tidegate_cpu_s_per_gib",
        "CPU seconds of Tidegate per GiB that it copies",
        "CPU s/GiB",
        "CPU seconds of all processes of Tidegate for each GiB that it copies, verifies and trims. Less is better.",
        "copying",
    ),
    "workers": _costs(
        "relay_cpu_s_per_gib",
        "CPU seconds of Tidegate per GiB, by workers",
        "CPU s/GiB",
        "CPU seconds of all processes of Tidegate for each GiB of records. Bars of the same length are the goal.",
        "workers",
    ),
    "empty_polls": _costs(
        "relay_us_per_poll",
        "CPU of an empty poll",
        "CPU us a poll",
        "CPU time of the relay for each poll that finds nothing. Less is better.",
        "empty-polls",
    ),
    "idle_connections": _costs(
        "kib_per_connection",
        "Memory of an idle connection",
        "KiB",
        "Growth of the relay's own memory, divided by the connections. The kernel's memory for sockets is not in it.",
        "idle-connections",
    ),
    "small_segments": _costs(
        "mb_per_s",
        "One task of Spark reads small segments from a far store",
        "MB/s",
        "Each segment takes two round trips: one for its indexes, and one for its log.",
        "small-segments",
    ),
    "store_model": _costs(
        "mb_per_s",
        "Throughput of the S3 server and of the modelled stores",
        "MB/s",
        "Ranges of 8 MiB. One connection of a modelled store should have the rate of its model.",
        "store-model",
    ),
}
