"""The ledger of an export to plain files: one plan follows another, and each plan has one exporter."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from pipeline.export.ledger import ParquetLedger, TileResult, create_bytes
from pipeline.export.plan import Exported, Tile, tile_of_name
from pipeline.export.target import ExportTarget, TargetSettings, open_target
from tiers.upkeep.runner import JobError

TOPIC_ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")
FIRST, SECOND, THIRD = Tile(0, 0, 9), Tile(0, 10, 19), Tile(0, 20, 29)


@pytest.fixture
def target(tmp_path: Path) -> ExportTarget:
    return open_target(TargetSettings(tmp_path.as_uri()))


def ledger(target: ExportTarget, layout: str = "plain") -> ParquetLedger:
    return ParquetLedger(target, "orders", layout)


def written(target: ExportTarget, tile: Tile) -> None:
    assert create_bytes(target, tile.file_name(TOPIC_ID), b"file")


def staged(target: ExportTarget, tmp_path: Path, tile: Tile) -> TileResult:
    source = tmp_path / "source"
    source.write_bytes(b"file")
    return TileResult(tile, 1, staged=(target.stage(tile.file_name(TOPIC_ID), source),))


def files(target: ExportTarget) -> list[Tile | None]:
    return [tile_of_name(name) for name in target.names(f"{TOPIC_ID}/")]


def test_a_promised_file_that_is_missing_is_pending(target: ExportTarget) -> None:
    one = ledger(target)
    assert one.load(TOPIC_ID) == Exported()
    assert one.promise([FIRST, SECOND], [])
    written(target, SECOND)
    assert ledger(target).load(TOPIC_ID) == Exported({0: 20}, pending=(FIRST,))

    # A promise that is kept by and by needs no other plan.
    other = ledger(target)
    other.load(TOPIC_ID)
    assert other.promise([FIRST], [])
    assert other.promise([THIRD], [FIRST])
    assert ledger(target).load(TOPIC_ID) == Exported({0: 30}, pending=(FIRST, THIRD))
    assert len(target.names("_tidegate_export/orders/")) == 2


def test_the_leader_epochs_of_the_offsets_are_kept(target: ExportTarget) -> None:
    one = ledger(target)
    one.load(TOPIC_ID, {0: 4, 1: 7})
    assert one.promise([FIRST], [])
    again = ledger(target)
    assert again.load(TOPIC_ID, {0: 5, 1: 7}).leader_epochs == {0: 4}
    assert again.promise([SECOND], [FIRST])
    assert ledger(target).load(TOPIC_ID).leader_epochs == {0: 5}


def test_one_of_two_exporters_gets_the_next_plan(target: ExportTarget) -> None:
    one, other = ledger(target), ledger(target)
    one.load(TOPIC_ID)
    other.load(TOPIC_ID)
    assert other.promise([Tile(0, 0, 4)], [])
    assert not one.promise([FIRST], [])
    assert one.load(TOPIC_ID) == Exported({0: 5}, pending=(Tile(0, 0, 4),))


def test_a_promise_that_is_cut_is_promised_in_its_parts(target: ExportTarget) -> None:
    one = ledger(target)
    one.load(TOPIC_ID)
    one.promise([FIRST], [])
    assert one.commit([TileResult(FIRST, stopped_at=4)]) == []
    assert one.promise([Tile(0, 0, 3)], [Tile(0, 4, 9)])
    written(target, Tile(0, 0, 3))
    assert ledger(target).load(TOPIC_ID) == Exported({0: 10}, pending=(Tile(0, 4, 9),))


def test_nothing_beyond_a_hole_is_published(target: ExportTarget, tmp_path: Path) -> None:
    one, beside = ledger(target), Tile(1, 0, 9)
    one.load(TOPIC_ID)
    one.promise([FIRST, SECOND, THIRD, beside], [])
    results = [staged(target, tmp_path, tile) for tile in (beside, THIRD, FIRST)]
    results.append(TileResult(SECOND, stopped_at=14))
    assert [result.tile for result in one.commit(results)] == [FIRST, beside]
    assert files(target) == [FIRST, beside]
    assert target.staged(f"{TOPIC_ID}/") == []
    assert ledger(target).load(TOPIC_ID).pending == (SECOND, THIRD)


def test_a_tile_that_another_exporter_cut_is_not_published_whole(target: ExportTarget, tmp_path: Path) -> None:
    slow, other = ledger(target), ledger(target)
    slow.load(TOPIC_ID)
    slow.promise([FIRST, SECOND, THIRD], [])
    results = [staged(target, tmp_path, tile) for tile in (FIRST, SECOND, THIRD)]
    other.load(TOPIC_ID)
    assert other.promise([FIRST, Tile(0, 10, 13)], [Tile(0, 14, 19), THIRD])
    assert [result.tile for result in slow.commit(results)] == [FIRST]
    assert [result.tile for result in other.commit([staged(target, tmp_path, Tile(0, 10, 13))])] == [Tile(0, 10, 13)]
    assert files(target) == [FIRST, Tile(0, 10, 13)]


def test_a_tile_that_was_published_whole_is_not_published_in_parts(target: ExportTarget, tmp_path: Path) -> None:
    one, other = ledger(target), ledger(target)
    one.load(TOPIC_ID)
    one.promise([FIRST, SECOND], [])
    other.load(TOPIC_ID)
    whole = staged(target, tmp_path, FIRST)
    part = staged(target, tmp_path, Tile(0, 0, 3))
    assert target.publish(whole.staged[0])
    assert other.promise([Tile(0, 0, 3)], [Tile(0, 4, 9), SECOND])
    assert other.commit([part]) == []
    assert files(target) == [FIRST]
    assert ledger(target).load(TOPIC_ID).pending == (SECOND,)


def test_useless_staged_files_of_a_dead_run_are_removed(target: ExportTarget, tmp_path: Path) -> None:
    one = ledger(target)
    one.load(TOPIC_ID)
    one.promise([FIRST, SECOND], [])
    left = [staged(target, tmp_path, tile) for tile in (FIRST, SECOND, THIRD)]
    written(target, FIRST)
    assert ledger(target).load(TOPIC_ID).pending == (SECOND,)
    assert target.staged(f"{TOPIC_ID}/") == list(left[1].staged)
    target.discard(left[1].staged[0])
    with pytest.raises(JobError, match=r"the staged file for .* is gone: run the export again"):
        one.commit([left[1]])


def test_another_topic_other_columns_and_files_without_a_plan_are_refused(target: ExportTarget, tmp_path: Path) -> None:
    one = ledger(target)
    one.load(TOPIC_ID)
    one.promise([FIRST], [])
    [name] = target.names("_tidegate_export/")
    assert json.loads((tmp_path / name).read_text())["topicId"] == str(TOPIC_ID)
    with pytest.raises(JobError, match=f"another topic orders, with the id {TOPIC_ID}"):
        ledger(target).load(uuid.uuid4())
    with pytest.raises(JobError, match="was begun with other columns"):
        ledger(target, "typed").load(TOPIC_ID)
    written(target, FIRST)
    with pytest.raises(JobError, match="has files of payments, but no plan"):
        ParquetLedger(target, "payments", "plain").load(TOPIC_ID)


def test_an_old_plan_cannot_publish_records_that_were_cut_since(target: ExportTarget, tmp_path: Path) -> None:
    slow, other = ledger(target), ledger(target)
    slow.load(TOPIC_ID)
    slow.promise([FIRST, SECOND], [])
    whole, kept = (staged(target, tmp_path, tile).staged[0] for tile in (FIRST, SECOND))
    other.load(TOPIC_ID)
    assert other.promise([Tile(0, 0, 3)], [Tile(0, 4, 9), SECOND])
    assert len(other.commit([staged(target, tmp_path, Tile(0, 0, 3))])) == 1
    assert not target.publish(whole)
    assert files(target) == [Tile(0, 0, 3)]
    assert target.publish(kept)


def test_two_exporters_of_one_promise_both_continue(target: ExportTarget, tmp_path: Path) -> None:
    one, other = ledger(target), ledger(target)
    one.load(TOPIC_ID)
    one.promise([FIRST, SECOND], [])
    other.load(TOPIC_ID)
    first = staged(target, tmp_path, FIRST)
    assert len(other.commit([staged(target, tmp_path, FIRST)])) == 1
    assert [result.tile for result in one.commit([first, staged(target, tmp_path, SECOND)])] == [FIRST, SECOND]
    assert files(target) == [FIRST, SECOND]
    assert target.staged(f"{TOPIC_ID}/") == []
