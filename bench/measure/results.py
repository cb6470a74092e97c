"""What a run measured, as values that are written to JSON and read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.measure.processes import NOISY_SHARE, Span
from bench.measure.statistics import Spread, spread


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one case in one round, by name. A name ends in its unit: `mib_per_s`, `cpu_s_per_gib`."""

    case: str
    way: str
    """What the clients spoke to, such as `Tidegate` or `broker`."""
    round: int
    figures: Mapping[str, float]
    foreign_share: float = 0.0
    load: float = 0.0

    @property
    def is_noisy(self) -> bool:
        return self.foreign_share > NOISY_SHARE


def reading(case: str, way: str, number: int, figures: Mapping[str, float], span: Span) -> Reading:
    return Reading(case, way, number, dict(figures), round(span.foreign_share, 4), round(span.load, 2))


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
        return next((one for one in self.scenarios if one.name == name), None)


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
            "readings": [Reading(**one) for one in values["readings"]],
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
