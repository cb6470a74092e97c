"""The drawings: where a bound stands, and what a sparkline shows."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from proxy.admin.drawing import SPARK_HEIGHT, SPARK_WIDTH, bounds_drawing, sparkline
from proxy.admin.facts import GapFacts, PartitionPage, SegmentSpan, Series
from tests.support.proxy.page_facts import ScriptedFacts


def page(**line: int | None) -> PartitionPage:
    found = asyncio.run(ScriptedFacts().partition("orders-0000", 0, 0))
    assert found is not None
    return replace(found, line=replace(found.line, **line))  # type: ignore[arg-type]


def test_bounds_stand_in_the_order_of_their_offsets() -> None:
    drawing = bounds_drawing(page())
    assert drawing is not None
    assert [mark.names for mark in drawing.marks] == [
        "log start, remote first",
        "local first",
        "remote last",
        "LSO",
        "HW",
    ]
    assert [mark.letters for mark in drawing.marks] == ["Rx", "Lx", "Ry", "Ly", "Lz"]
    places = [mark.x for mark in drawing.marks]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0, 100)
    assert [mark.anchor for mark in drawing.marks] == ["start", "middle", "middle", "middle", "end"]


def test_a_short_run_of_offsets_can_be_seen() -> None:
    drawing = bounds_drawing(page(high_watermark=10_000_000_000))
    assert drawing is not None
    assert not drawing.is_to_scale
    places = [mark.x for mark in drawing.marks]
    assert min(later - earlier for earlier, later in itertools.pairwise(places)) > 5


def test_bounds_at_one_offset_share_a_mark() -> None:
    at = 196_608
    drawing = bounds_drawing(page(last_stable_offset=at, high_watermark=at))
    assert drawing is not None
    assert (drawing.marks[-1].names, drawing.marks[-1].letters) == ("remote last, LSO, HW", "Ry Ly Lz")


def test_an_open_transaction_and_a_gap_are_drawn() -> None:
    drawing = bounds_drawing(replace(page(), gaps=(GapFacts(100, 200),)))
    assert drawing is not None
    assert [box.kind for box in drawing.local] == ["both", "local", "unstable"]
    (gap,) = drawing.gaps
    assert gap.title == "offsets 100 to 199, in neither tier"
    assert drawing.kinds == ["remote", "both", "local", "unstable", "gap"]


def test_the_drawing_has_the_colours_of_the_bars() -> None:
    found = page(local_start=150, remote_end=299, last_stable_offset=400, high_watermark=400, log_start_offset=0)
    drawing = bounds_drawing(
        replace(found, shape=(SegmentSpan(0, 200, "remote", 2), SegmentSpan(200, 300, "copying", 1)))
    )
    assert drawing is not None
    assert [box.kind for box in drawing.remote] == ["remote", "both", "copying"]
    assert [box.kind for box in drawing.local] == ["both", "local"]
    assert drawing.local[0].x == drawing.remote[1].x


def test_an_unknown_leader_leaves_the_remote_tier() -> None:
    drawing = bounds_drawing(page(local_start=None, last_stable_offset=None, high_watermark=None))
    assert drawing is not None
    assert drawing.local == ()
    assert [mark.names for mark in drawing.marks] == ["log start, remote first", "remote last"]


def test_a_partition_of_which_nothing_is_known_has_no_drawing() -> None:
    unknown = dict.fromkeys(
        ("log_start_offset", "remote_start", "remote_end", "local_start", "last_stable_offset", "high_watermark")
    )
    assert bounds_drawing(replace(page(**unknown), shape=())) is None
    assert bounds_drawing(replace(page(**unknown), shape=(SegmentSpan(5, 9, "remote", 1),))) is not None


def test_a_sparkline_has_a_hole_where_it_has_no_value() -> None:
    drawn = sparkline(Series("x", "ms", (1.0, 2.0, None, None, 4.0)))
    assert drawn.line.count("M") == 2
    assert (drawn.last, drawn.highest) == (4.0, 4.0)
    assert sparkline(Series("x", "ms", ())).line == ""
    assert sparkline(Series("x", "ms", (0.0, 0.0))).line != ""


def test_a_sparkline_fills_its_width_and_shares_an_axis() -> None:
    drawn = sparkline(Series("x", "ms", (1.0, 2.0, 3.0)))
    places = [float(each.split(",")[0]) for each in drawn.line.removeprefix("M").split(" L")]
    assert places == pytest.approx([0, SPARK_WIDTH / 2, SPARK_WIDTH])
    low = sparkline(Series("x", "ms", (1.0, 1.0)), ceiling=10.0)
    assert float(low.line.split(",")[1].split(" ")[0]) > SPARK_HEIGHT * 0.8
