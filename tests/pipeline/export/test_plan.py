"""The tiles of a plan cover every record of the export once, also after losses, gaps and unreadable segments."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from pipeline.export.plan import Exported, ExportPlan, Tile, plan_export, tile_of_name
from pipeline.source.read_plan import LocalRange, MissingOffsets, ReadRange
from tiers.model.ids import TopicIdPartition

TOPIC_ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")
RECORD_BYTES = 10


def ranges(partition: int, first: int, end: int) -> list[ReadRange | MissingOffsets]:
    """A log that is lost below offset 5."""
    where = TopicIdPartition(TOPIC_ID, partition, "orders")
    found: list[ReadRange | MissingOffsets] = []
    if first < 5:
        found.append(MissingOffsets(where, first, min(end, 4)))
    if end >= 5:
        found.append(LocalRange(where, max(first, 5), end, RECORD_BYTES))
    return found


def plan(exported: Exported, end: int = 100, stops: dict[int, int] | None = None, partitions: int = 1) -> ExportPlan:
    bounds = dict.fromkeys(range(partitions), (5, end))
    return plan_export(exported, bounds, stops or {}, ranges, file_bytes=30 * RECORD_BYTES)


def spans(planned: ExportPlan, partition: int = 0) -> list[tuple[int, int]]:
    tiles = [one.tile for one in planned.tiles if one.tile.partition == partition]
    return [(tile.first_offset, tile.end_offset) for tile in tiles]


def test_a_file_is_named_by_what_is_in_it() -> None:
    name = Tile(3, 10, 99).file_name(TOPIC_ID)
    assert name == f"{TOPIC_ID}/3/10-99.parquet"
    assert tile_of_name(name) == Tile(3, 10, 99)
    assert tile_of_name(f"{TOPIC_ID}/3/10-99.parquet.part") is None


def test_the_first_export_begins_at_the_log_start_and_the_next_resumes() -> None:
    assert spans(plan(Exported())) == [(5, 27), (28, 51), (52, 75), (76, 99)]
    assert spans(plan(Exported({0: 100}))) == []
    assert spans(plan(Exported({0: 90}))) == [(90, 99)]


def test_partitions_take_turns() -> None:
    planned = plan(Exported({0: 60}), partitions=2)
    assert [one.tile.partition for one in planned.tiles] == [0, 1, 0, 1, 1, 1]


def test_a_promised_plan_comes_first_unchanged_and_alone() -> None:
    planned = plan(Exported({0: 90}, pending=(Tile(0, 20, 79),)))
    assert spans(planned) == [(20, 79)]
    assert [one.is_promised for one in planned.tiles] == [True]
    assert not planned.is_last
    assert plan(Exported({0: 90})).is_last


def test_nothing_is_planned_from_a_stop_on_and_a_promise_is_cut_there() -> None:
    planned = plan(Exported({0: 90}, pending=(Tile(0, 20, 79), Tile(0, 80, 89))), stops={0: 50}, partitions=2)
    assert spans(planned) == [(20, 49)]
    assert planned.blocked == (Tile(0, 50, 79), Tile(0, 80, 89))
    assert spans(planned, 1) == spans(plan(Exported()))
    assert spans(plan(Exported({0: 20}), stops={0: 40})) == [(20, 39)]
    assert plan(Exported({0: 50}, pending=(Tile(0, 40, 49),)), stops={0: 40}).blocked == (Tile(0, 40, 49),)


def test_lost_records_are_reported() -> None:
    planned = plan(Exported({0: 2}))
    assert [(gap.first_offset, gap.end_offset) for gap in planned.gaps] == [(2, 4)]
    assert spans(planned)[0][0] == 5


@given(st.integers(5, 120), st.none() | st.integers(5, 130))
def test_the_rest_is_covered_once(first: int, stop: int | None) -> None:
    found = spans(plan(Exported({0: first}), stops={} if stop is None else {0: stop}))
    covered = [offset for begin, end in found for offset in range(begin, end + 1)]
    assert covered == list(range(first, 100 if stop is None else stop))
