"""What an export to plain files has promised: one plan after the other, each by one exporter."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from pipeline.export_ledger import ParquetLedger, TileResult, create_bytes
from pipeline.export_plan import Exported, Tile
from pipeline.export_target import ExportTarget, FolderTarget
from pipeline.job import JobError

TOPIC_ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")
FIRST, SECOND, THIRD = Tile(0, 0, 9), Tile(0, 10, 19), Tile(0, 20, 29)


@pytest.fixture
def target(tmp_path: Path) -> ExportTarget:
    return FolderTarget(tmp_path)


def ledger(target: ExportTarget, layout: str = "plain") -> ParquetLedger:
    return ParquetLedger(target, "orders", layout)


def written(target: ExportTarget, tile: Tile) -> None:
    assert create_bytes(target, tile.file_name(TOPIC_ID), b"file")


def test_what_was_promised_and_is_not_there_is_pending(target: ExportTarget) -> None:
    one = ledger(target)
    assert one.load(TOPIC_ID) == Exported()
    assert one.reserve([FIRST, SECOND], [])
    written(target, SECOND)
    assert ledger(target).load(TOPIC_ID) == Exported({0: 20}, pending=(FIRST,))

    # A promise that is kept by and by needs no other plan.
    other = ledger(target)
    other.load(TOPIC_ID)
    assert other.reserve([FIRST], [])
    assert other.reserve([THIRD], [FIRST])
    assert ledger(target).load(TOPIC_ID) == Exported({0: 30}, pending=(FIRST, THIRD))
    assert len(target.names("_tidegate_export/orders/")) == 2


def test_of_two_that_want_the_next_plan_one_gets_it(target: ExportTarget) -> None:
    one, other = ledger(target), ledger(target)
    one.load(TOPIC_ID)
    other.load(TOPIC_ID)
    assert other.reserve([Tile(0, 0, 4)], [])
    assert not one.reserve([FIRST], [])
    assert one.load(TOPIC_ID) == Exported({0: 5}, pending=(Tile(0, 0, 4),))


def test_a_promise_that_is_cut_is_promised_in_its_parts(target: ExportTarget) -> None:
    one = ledger(target)
    one.load(TOPIC_ID)
    one.reserve([FIRST], [])
    assert one.commit([TileResult(FIRST, stopped_at=4)]) == []
    assert one.reserve([Tile(0, 0, 3)], [Tile(0, 4, 9)])
    written(target, Tile(0, 0, 3))
    assert ledger(target).load(TOPIC_ID) == Exported({0: 10}, pending=(Tile(0, 4, 9),))


def test_another_topic_other_columns_and_files_without_a_plan_are_refused(target: ExportTarget, tmp_path: Path) -> None:
    one = ledger(target)
    one.load(TOPIC_ID)
    one.reserve([FIRST], [])
    [name] = target.names("_tidegate_export/")
    assert json.loads((tmp_path / name).read_text())["topicId"] == str(TOPIC_ID)
    with pytest.raises(JobError, match=f"another topic orders, with the id {TOPIC_ID}"):
        ledger(target).load(uuid.uuid4())
    with pytest.raises(JobError, match="was begun with other columns"):
        ledger(target, "typed").load(TOPIC_ID)
    written(target, FIRST)
    with pytest.raises(JobError, match="has files of payments, but no plan"):
        ParquetLedger(target, "payments", "plain").load(TOPIC_ID)
