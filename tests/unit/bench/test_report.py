"""The report: a page that needs nothing else, and pictures that are well-formed and have the figures of the run."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench.measure.results import Run, ScenarioResult
from bench.report import page, sections
from bench.report.svg import shown
from tests.support.measured_run import measured_run


@pytest.fixture(scope="module")
def run() -> Run:
    return measured_run()


def scenario(run: Run, name: str) -> ScenarioResult:
    found = run.scenario(name)
    assert found is not None
    return found


def test_the_page_loads_nothing(run: Run) -> None:
    written = page.page(run)
    addresses = set(re.findall(r"[a-z]+://[^\"'\s<]+", written))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which no browser opens
    assert re.findall(r"<(?:script|link|img|iframe)|@import|url\(", written) == []


def test_every_table_has_the_median_of_every_figure(run: Run) -> None:
    written = page.page(run)
    for one in run.scenarios:
        section = written[written.index(f'id="{one.name}"') :].partition("</section>")[0]
        for case in one.cases():
            for way in one.ways():
                for figure in sections.columns_of(one):
                    if (value := one.spread(case, way, figure)).rounds:
                        assert shown(value.median) in section


def test_the_page_warns_of_a_busy_machine(run: Run) -> None:
    readings = sum(len(one.readings) for one in run.scenarios)
    assert f"12 of {readings} readings are from noisy rounds" in page.page(run)
    quiet = Run(run.began, "c", "", {}, {}, {}, [scenario(run, "backfill")])
    assert "noisy rounds" not in page.page(quiet).partition("<section")[0]


def test_text_of_a_run_is_no_markup(run: Run) -> None:
    hostile = ScenarioResult("x", "<script>alert(1)</script>", notes=["<b>&"])
    written = page.page(Run("", "<i>", "", {}, {}, {}, [hostile]))
    assert "<script" not in written
    assert "&lt;b&gt;&amp;" in written


def test_the_pictures_are_files_for_light_and_dark(run: Run, tmp_path: Path) -> None:
    page.write(run, tmp_path)
    written = {path.stem: path.read_text() for path in tmp_path.glob("*.svg")}
    assert {"tail-and-backfill", "backfill", "first-record", "pass-through", "round-trip"} <= set(written)
    for content in written.values():
        assert ET.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme:dark" in content
        assert "nan" not in content


def test_bars_are_as_long_as_their_values(run: Run) -> None:
    backfill = scenario(run, "backfill")
    (figure,) = sections.figures_of(backfill)
    svg = ET.fromstring(figure.picture.file())
    lengths = {}
    for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
        said = rect.find("{http://www.w3.org/2000/svg}title")
        if said is not None and said.text:
            way, _, rest = said.text.partition(", ")
            lengths[way, rest.partition(":")[0]] = float(rect.attrib["width"])
    far, near = lengths["Tidegate", "a far store"], lengths["Tidegate", "a store nearby"]
    medians = [backfill.spread(case, "Tidegate", "mib_per_s").median for case in ("far", "near")]
    assert far / near == pytest.approx(medians[0] / medians[1], rel=0.01)


def test_the_timeline_shows_the_median_round(run: Run) -> None:
    tail = scenario(run, "tail_and_backfill")
    rounds = [(one.figures["consume_p99_ms"], one.round) for one in tail.readings]
    last = [each for each, one in zip(rounds, tail.readings, strict=True) if one.case == "16 backfills"]
    by_way = [sorted(last[start : start + 3])[1][1] for start in (0, 3, 6)]
    chosen = [sections.median_round(tail, way, "16 backfills") for way in tail.ways()]
    assert [one.round for one in chosen if one is not None] == by_way


def test_a_scenario_without_readings_has_a_report() -> None:
    empty = Run("", "c", "", {}, {}, {}, [ScenarioResult(name, "?") for name in ("tail_and_backfill", "backfill")])
    assert page.key_figures(empty) == []
    assert "<svg" not in page.page(empty)
