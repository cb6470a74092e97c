"""A run of the benchmark with invented figures, for tests of the report. They say nothing about Tidegate."""

from __future__ import annotations

import math
import random

from bench.measure.processes import Span
from bench.measure.results import Phase, Run, ScenarioResult, Timeline, reading

QUIET = Span(seconds=5.0, cpu_s={}, foreign_share=0.01, load=1.0)
NOISY = Span(seconds=5.0, cpu_s={}, foreign_share=0.4, load=9.0)
PHASES = [Phase(0, 1.0, 6.0), Phase(1, 8.0, 13.0), Phase(4, 15.0, 20.0), Phase(16, 23.0, 28.0)]
WAYS = {"broker": 1.0, "Tidegate": 1.6, "native KIP-405": 5.0}


def measured_run() -> Run:
    return Run(
        began="2026-01-02T03:04:05+00:00",
        commit="0123abc",
        command="python -m bench",
        machine={"processor": "An invented processor", "cores": 2, "memory_gib": 24, "kernel": "6.1"},
        versions={"Kafka": "4.3.0", "Python": "3.11.7"},
        size={"rounds": 3, "history_mib": 512},
        scenarios=[_tail(), _first_record(), _backfill(), _pass_through(), _round_trip()],
        seconds=590.0,
    )


def _tail() -> ScenarioResult:
    result = ScenarioResult("tail_and_backfill", "What do clients at the tail feel?", seconds=100.0)
    for way, factor in WAYS.items():
        for number in range(3):
            drawn = random.Random(f"{way} {number}")
            for phase in PHASES:
                slow = factor * (1 + phase.consumers)
                figures = {"backfill_mb_per_s": 60.0 * math.sqrt(phase.consumers) / factor, "cpu_share": 0.1}
                for kind in ("consume", "produce"):
                    figures |= {f"{kind}_p50_ms": 0.8 * factor, f"{kind}_p99_ms": slow * drawn.uniform(1.8, 2.2)}
                    figures |= {f"{kind}_p999_ms": slow * 4, f"{kind}_max_ms": slow * 6}
                case = "1 backfill" if phase.consumers == 1 else f"{phase.consumers} backfills"
                result.readings.append(reading(case, way, number, figures, NOISY if number == 2 else QUIET))
            result.timelines.append(_timeline(way, number, factor, drawn))
    return result


def _timeline(way: str, number: int, factor: float, drawn: random.Random) -> Timeline:
    tail, backfill = [], []
    for step in range(28 * 50):
        consumers = max(phase.consumers for phase in PHASES if phase.begin_s - 2 <= step / 50)
        latency = factor * (0.7 + drawn.expovariate(1.0) * (0.1 + consumers * 0.15))
        tail.append((step / 50, round(latency * 0.6, 3), round(latency, 3)))
        if step % 10 == 0:
            backfill.append((step / 50, 60.0 * math.sqrt(consumers) / factor * drawn.uniform(0.8, 1.1)))
    return Timeline(way, number, PHASES, tail, backfill)


def _first_record() -> ScenarioResult:
    result = ScenarioResult("first_record", "How long does a consumer wait after a seek?", seconds=30.0)
    drawn = random.Random(1)
    for case, ways in {
        "local tier": {"broker": 3.0, "Tidegate": 3.5},
        "far store, first": {"Tidegate": 130.0, "native KIP-405": 210.0},
        "far store, again": {"Tidegate": 6.0, "native KIP-405": 140.0},
    }.items():
        for way, middle in ways.items():
            for number in range(3):
                samples = [middle * drawn.lognormvariate(0, 0.2) for _ in range(25)]
                result.readings.append(reading(case, way, number, {}, QUIET, samples))
    return result


def _backfill() -> ScenarioResult:
    result = ScenarioResult("backfill", "How fast does one consumer read history?", seconds=60.0)
    drawn = random.Random(2)
    for case, ways in {
        "no store": {"broker": 400.0},
        "folder": {"Tidegate": 330.0, "native KIP-405": 170.0},
        "near": {"Tidegate": 300.0, "native KIP-405": 110.0},
        "far": {"Tidegate": 210.0, "native KIP-405": 14.0},
    }.items():
        for way, middle in ways.items():
            for number in range(3):
                figures = {"mib_per_s": middle * drawn.uniform(0.9, 1.1), "server_cpu_s_per_gib": 500 / middle}
                result.readings.append(reading(case, way, number, figures, QUIET))
    return result


def _pass_through() -> ScenarioResult:
    result = ScenarioResult("pass_through", "What does it cost to pass records through?", seconds=150.0)
    result.notes.append("grepplabs was left out: nobody gave its path.")
    drawn = random.Random(3)
    for case in ("produce", "consume", "8 consumers", "produce, TLS", "consume, TLS", "8 consumers, TLS"):
        for way, cost in {"broker": None, "haproxy": 0.8, "Tidegate": 0.6}.items():
            for number in range(3):
                figures = {"mib_per_s": 300 * drawn.uniform(0.9, 1.1), "broker_cpu_s_per_gib": 0.9}
                if cost is not None:
                    figures |= {"relay_cpu_s_per_gib": cost * drawn.uniform(0.9, 1.1), "relay_mib": 60.0}
                result.readings.append(reading(case, way, number, figures, QUIET))
    return result


def _round_trip() -> ScenarioResult:
    result = ScenarioResult("round_trip", "How much does a relay add to a round trip?", seconds=10.0)
    drawn = random.Random(4)
    for way, middle in {"broker": 0.5, "haproxy": 0.6, "Tidegate": 0.65}.items():
        samples = [middle * drawn.lognormvariate(0, 0.25) for _ in range(500)]
        figures = {"added_p50_ms": middle - 0.5, "added_p99_ms": middle - 0.4, "cpu_us_per_request": 40.0}
        result.readings.append(reading("one record", way, 0, figures, QUIET, samples))
    return result
