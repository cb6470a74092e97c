"""What a run measured, as values that are written to JSON and read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.measure.processes import NOISY_SHARE, Span
from bench.measure.statistics import Spread, percentile, quantiles, spread


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one case in one round, by name. A name ends in its unit: `mib_per_s`, `cpu_s_per_gib`."""

    case: str
    way: str
    """What the clients spoke to, such as `Tidegate` or `broker`."""
    round: int
    figures: Mapping[str, float]
    foreign_share: float = 0.0
    """The share of the machine's CPU time that other programs took meanwhile."""
    load: float = 0.0
    quantiles: Sequence[float] = ()
    """For a latency: 101 values in milliseconds, from the least to the greatest."""

    @property
    def is_noisy(self) -> bool:
        return self.foreign_share > NOISY_SHARE


def reading(
    case: str, way: str, number: int, figures: Mapping[str, float], span: Span, latencies_ms: Sequence[float] = ()
) -> Reading:
    """Returns the reading of a round. Some quantiles of its latencies, if it has any, are figures too."""
    rounded = {name: float(f"{value:.6g}") for name, value in {**figures, **_percentiles(latencies_ms)}.items()}
    steps = tuple(round(one, 3) for one in quantiles(latencies_ms))
    return Reading(case, way, number, rounded, round(span.foreign_share, 4), round(span.load, 2), steps)


def _percentiles(latencies_ms: Sequence[float]) -> dict[str, float]:
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
    return {name: percentile(latencies_ms, share) for name, share in shares.items()} if latencies_ms else {}


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a timeline, in seconds from its beginning, with a fixed number of consumers that backfill."""

    consumers: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One way in one round: what the tail felt, and how fast the backfills were, over time."""

    way: str
    round: int
    phases: list[Phase]
    tail: list[tuple[float, float, float]]
    """Seconds from the beginning, produce ms, produce-to-consume ms."""
    backfill: list[tuple[float, float]]
    """Seconds from the beginning, MB/s of all consumers in the slice that begins there."""


@dataclass(slots=True)
class ScenarioResult:
    name: str
    question: str
    readings: list[Reading] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Plain statements that belong beside the figures, such as a peer that was left out."""
    seconds: float = 0.0

    def cases(self) -> list[str]:
        return list(dict.fromkeys(each.case for each in self.readings))

    def ways(self) -> list[str]:
        return list(dict.fromkeys(each.way for each in self.readings))

    def spread(self, case: str, way: str, figure: str) -> Spread:
        """Returns the spread of a figure over the rounds."""
        found = (one for one in self.readings if one.case == case and one.way == way)
        return spread(one.figures[figure] for one in found if figure in one.figures)

    def quantiles(self, case: str, way: str) -> list[float]:
        """Returns the medians over the rounds of each quantile of a latency. Empty: there is none."""
        rounds = [one.quantiles for one in self.readings if one.case == case and one.way == way and one.quantiles]
        return [spread(values).median for values in zip(*rounds, strict=True)]

    def noisy_rounds(self, case: str, way: str) -> int:
        return sum(one.is_noisy for one in self.readings if one.case == case and one.way == way)


@dataclass(slots=True)
class Run:
    """All scenarios of one run, and what it ran on."""

    began: str
    commit: str
    command: str
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    size: Mapping[str, float]
    scenarios: list[ScenarioResult] = field(default_factory=list)
    seconds: float = 0.0

    def scenario(self, name: str) -> ScenarioResult | None:
        """Returns a scenario if it has readings."""
        return next((one for one in self.scenarios if one.name == name and one.readings), None)


def write(run: Run, path: Path) -> None:
    path.write_text(json.dumps(asdict(run), indent=1) + "\n")


def read(path: Path) -> Run:
    """Reads what `write` has written."""
    values = json.loads(path.read_text())
    return Run(**{**values, "scenarios": [_scenario(one) for one in values["scenarios"]]})


def _scenario(values: dict[str, Any]) -> ScenarioResult:
    return ScenarioResult(
        **{
            **values,
            "readings": [Reading(**{**one, "quantiles": tuple(one["quantiles"])}) for one in values["readings"]],
            "timelines": [_timeline(one) for one in values["timelines"]],
        }
    )


def _timeline(values: dict[str, Any]) -> Timeline:
    return Timeline(
        way=values["way"],
        round=values["round"],
        phases=[Phase(**one) for one in values["phases"]],
        tail=_triples(values["tail"]),
        backfill=[(at, rate) for at, rate in values["backfill"]],
    )


def _triples(rows: Iterable[list[float]]) -> list[tuple[float, float, float]]:
    return [(first, second, third) for first, second, third in rows]
