"""Writes the report: one HTML page without references to anything else, and the pictures as files."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench.measure import results
from bench.measure.processes import NOISY_SHARE
from bench.measure.results import Run, ScenarioResult
from bench.report.sections import COLUMNS, Figure, columns_of, figures_of
from bench.report.style import key_of, page_css
from bench.report.svg import shown

NAME = "report.html"


def write(run: Run, folder: Path) -> Path:
    """Writes the page and a file for each picture into the folder. Returns the path of the page."""
    for result in run.scenarios:
        for figure in figures_of(result):
            (folder / f"{figure.name}.svg").write_text(figure.picture.file())
    path = folder / NAME
    path.write_text(page(run))
    return path


def page(run: Run) -> str:
    parts = [_head(run), _cards(run), *(_section(one) for one in run.scenarios), _method(run)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Tidegate benchmark, {escape(run.began[:10])}</title>\n<style>{page_css()}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _head(run: Run) -> str:
    of = run.machine
    machine = f"{of.get('processor', '')}, {of.get('cores', '?')} cores, {of.get('memory_gib', '?')} GiB"
    readings = [one for result in run.scenarios for one in result.readings]
    noisy = sum(one.is_noisy for one in readings)
    warning = ""
    if noisy:
        warning = (
            f'<p class="lead noisy">{noisy} of {len(readings)} readings are from noisy rounds: other programs used '
            "this machine at the same time. Their figures say little.</p>"
        )
    return (
        "<header><h1>Tidegate benchmark</h1>"
        f'<p class="lead">{escape(run.began[:16].replace("T", " "))} UTC, commit {escape(run.commit)}, on '
        f"{escape(machine)}. Clients, brokers, stores and proxies share this machine, over loopback. Everything that "
        f"is compared takes turns, and the figures are medians of the rounds.</p>{warning}</header>"
    )


def _cards(run: Run) -> str:
    cards = "".join(
        f'<div class="card"><b>{escape(value)} <small>{escape(unit)}</small></b><span>{escape(words)}</span></div>'
        for value, unit, words in key_figures(run)
    )
    return f'<div class="cards">{cards}</div>' if cards else ""


def key_figures(run: Run) -> list[tuple[str, str, str]]:
    """Returns a value, its unit and what it is, for the figures that say most. What was not measured is missing."""
    found: list[tuple[str, str, str]] = []
    if (tail := run.scenario("tail_and_backfill")) is not None and "Tidegate" in tail.ways():
        case = "4 backfills" if "4 backfills" in tail.cases() else tail.cases()[-1]
        mine, direct = (tail.spread(case, way, "consume_p99_ms").median for way in ("Tidegate", "broker"))
        words = f"p99 from produce to consume beside {case} from a far store"
        found.append((shown(mine), "ms", _beside(words, "the broker alone, from its own log", direct, "ms")))
    if (backfill := run.scenario("backfill")) is not None:
        case = backfill.cases()[-1]
        mine = backfill.spread(case, "Tidegate", "mib_per_s").median
        native = backfill.spread(case, "native KIP-405", "mib_per_s").median
        words = f"one default consumer reads history from the {case} store"
        found.append((shown(mine), "MiB/s", _beside(words, "Kafka's own tiered storage", native, "MiB/s")))
    if (passed := run.scenario("pass_through")) is not None:
        case = passed.cases()[2] if len(passed.cases()) > 2 else passed.cases()[-1]
        mine, floor = (passed.spread(case, way, "relay_cpu_s_per_gib").median for way in ("Tidegate", "haproxy"))
        words = f"to pass records through, {case}"
        found.append((shown(mine), "CPU s/GiB", _beside(words, "haproxy", floor, "CPU s/GiB")))
    if (first := run.scenario("first_record")) is not None:
        case = next((one for one in first.cases() if one.endswith("first")), first.cases()[-1])
        mine, native = (first.spread(case, way, "p50_ms").median for way in ("Tidegate", "native KIP-405"))
        found.append((shown(mine), "ms", _beside("to the first record after a seek, p50", "KIP-405", native, "ms")))
    return [one for one in found if one[0] != "-"]


def _beside(words: str, other: str, value: float, unit: str) -> str:
    return words if math.isnan(value) else f"{words}; {other}: {shown(value)} {unit}"


def _section(result: ScenarioResult) -> str:
    figures = "".join(_figure(one) for one in figures_of(result))
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in result.notes)
    return (
        f'<section id="{escape(result.name)}"><h2>{escape(result.question)}</h2>{figures}'
        f"<details><summary>All figures</summary>{_table(result)}</details>{notes}</section>"
    )


def _figure(figure: Figure) -> str:
    return f"<figure>{figure.picture.inline()}<figcaption>{escape(figure.caption)}</figcaption></figure>"


def _table(result: ScenarioResult) -> str:
    columns = columns_of(result)
    head = "".join(f"<th>{escape(title)}</th>" for title in ("", "", *(COLUMNS[name] for name in columns), "noisy"))
    rows: list[str] = []
    for case in result.cases():
        label = case
        for way in result.ways():
            cells = [_cell(result, case, way, name) for name in columns]
            if not any(cells):
                continue
            noisy = result.noisy_rounds(case, way)
            rounds = sum(one.case == case and one.way == way for one in result.readings)
            mark = f'<span class="noisy">{noisy} of {rounds}</span>' if noisy else ""
            way_cell = f'<span class="w w-{key_of(way)}"></span>{escape(way)}'
            inner = "".join(f"<td>{cell}</td>" for cell in (escape(label), way_cell, *cells, mark))
            rows.append(f"<tr{' class=next' if label else ''}>{inner}</tr>")
            label = ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cell(result: ScenarioResult, case: str, way: str, name: str) -> str:
    value = result.spread(case, way, name)
    if not value.rounds:
        return ""
    if value.rounds == 1:
        return shown(value.median)
    return f"{shown(value.median)} <i>{shown(value.least)} to {shown(value.greatest)}</i>"


def _method(run: Run) -> str:
    rows: Sequence[tuple[str, str]] = [
        ("command", run.command),
        ("took", f"{run.seconds / 60:.1f} minutes"),
        *((name.replace("_gib", ", GiB"), str(value)) for name, value in run.machine.items()),
        *run.versions.items(),
        *((name.replace("_", " "), shown(float(value))) for name, value in run.size.items()),
    ]
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return (
        '<section id="method"><h2>How this was measured</h2>'
        "<p>All ways take turns within a round, and ratios compare figures of one run. CPU seconds are the kernel's "
        "own accounts (<code>/proc/PID/stat</code>) of all processes of a server. Memory is the proportional set size."
        "</p>"
        f"<p>A round is noisy if other programs took more than {NOISY_SHARE:.0%} of the machine's CPU time while it "
        "ran: the kernel's count for the whole machine, less that of all processes of the benchmark. The tables say "
        "how many rounds of a figure were noisy. The figures of a noisy round stay in the medians.</p>"
        f"<dl>{listed}</dl></section>"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description="Writes the report of an earlier run again.")
    arguments.add_argument("results", type=Path)
    given = arguments.parse_args()
    print(write(results.read(given.results), given.results.parent))


if __name__ == "__main__":
    main()
