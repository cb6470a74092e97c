"""Whole exports to Iceberg tables: into partitions, after a refusal, and beside the files of runs that were killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.transforms import DayTransform, IdentityTransform

from pipeline.decode.record_columns import ALL_COLUMNS, KAFKA_COLUMNS
from pipeline.export.iceberg import IcebergLedger
from pipeline.export.ledger import TileResult
from pipeline.export.plan import PlannedTile
from pipeline.export.typed_values import TypedValues
from pipeline.source.read_plan import MissingOffsets
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.pipeline.log_exports import PARTITION, TABLE, KilledError, OneLog, TableExport, run, run_killed
from tiers.upkeep.runner import JobError

DAY_MS = 86_400_000
TYPED = TypedValues("json", '{"type": "object", "properties": {"id": {"type": "integer"}}}')


@pytest.fixture
def log() -> InMemoryLog:
    log = InMemoryLog()
    log.append(*(batch_of(first, 2, timestamp=day * DAY_MS) for first, day in ((0, 1), (2, 2), (4, 1))))
    return log


@pytest.fixture
def export(tmp_path: Path, log: InMemoryLog, monkeypatch: pytest.MonkeyPatch) -> TableExport:
    return TableExport(tmp_path, log, monkeypatch)


TIMES_MS = [DAY_MS, DAY_MS + 1, 2 * DAY_MS, 2 * DAY_MS + 1, DAY_MS, DAY_MS + 1]


def create(export: TableExport, schema: pa.Schema, *fields: tuple[str, Any]) -> Any:
    """Creates the table with these partition fields."""
    export.catalog().create_namespace("db")
    table = export.catalog().create_table(TABLE, schema)
    with table.update_spec() as update:
        for name, transform in fields:
            update.add_field(name, transform)
    return export.catalog().load_table(TABLE)


def files(export: TableExport) -> list[Path]:
    """Returns the files that a reader of the place sees."""
    return [path for path in (export.home / "lake").rglob("*.parquet") if ".tmp" not in path.parts]


def unexpected(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
    raise AssertionError("a tile is read")


def test_a_file_has_the_records_of_one_day(export: TableExport) -> None:
    create(export, KAFKA_COLUMNS.schema, ("timestamp", DayTransform()))
    export.run()
    assert export.times_ms() == TIMES_MS
    table = export.catalog().load_table(TABLE)
    found = {one.file.partition[0]: one.file.record_count for one in table.scan().plan_files()}
    assert found == {1: 4, 2: 2}
    (of_second_day,) = table.scan("timestamp >= '1970-01-03T00:00:00+00:00'").plan_files()
    assert of_second_day.file.record_count == 2
    assert len(files(export)) == 2


@pytest.mark.parametrize(
    ("schema", "fields", "change", "said"),
    [
        (KAFKA_COLUMNS.schema, (), {"include_headers": True}, "contains more columns: headers"),
        (
            TYPED.schema(KAFKA_COLUMNS.schema),
            (),
            {},
            "the table has 2: value: .*struct.*and the export .*binary",
        ),
        (
            KAFKA_COLUMNS.schema.append(pa.field("region", pa.string())),
            (("region", IdentityTransform()),),
            {},
            "identity of region cannot be computed",
        ),
        (KAFKA_COLUMNS.schema.append(pa.field("id", pa.int64(), nullable=False)), (), {}, "required long"),
    ],
    ids=["headers", "raw into typed", "partition by another column", "another required column"],
)
def test_a_table_that_does_not_fit_is_refused_before_a_tile_is_read(
    schema: pa.Schema,
    fields: tuple[tuple[str, Any], ...],
    change: dict[str, Any],
    said: str,
    export: TableExport,
    capsys: pytest.CaptureFixture[str],
) -> None:
    create(export, schema, *fields)
    export.request = replace(export.request, **change)
    with pytest.raises(JobError, match=f"the table db.orders does not fit this export: .*{said}.*: change the table"):
        export.run(unexpected)
    assert files(export) == []
    assert capsys.readouterr().out == ""


def test_leftovers_do_not_block(export: TableExport) -> None:
    create(export, ALL_COLUMNS.schema)
    right = export.request
    export.request = replace(right, is_committed_only=False)
    with pytest.raises(KilledError):
        export.run(run_killed)
    export.request = right
    export.run()
    assert export.times_ms() == TIMES_MS
    export.request = replace(right, is_committed_only=False)
    with pytest.raises(JobError, match="was begun with other columns, another value schema or another isolation level"):
        export.run(unexpected)


def test_files_of_a_failed_commit_do_not_block(export: TableExport, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("the catalog is down")

    with monkeypatch.context() as patch:
        patch.setattr(IcebergLedger, "_append", refuse)
        with pytest.raises(JobError, match=r"commit to db\.orders failed: the catalog is down: run the export again"):
            export.run()
    assert len(files(export)) == 1
    export.request = replace(export.request, file_bytes=3)
    export.run()
    assert export.times_ms() == TIMES_MS


def test_a_wave_whose_table_got_another_partition_spec_is_written_again(export: TableExport) -> None:
    table = create(export, KAFKA_COLUMNS.schema)
    waves: list[str] = []

    def changed(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
        results = run(what, plan, task)
        waves.append(what)
        if len(waves) == 1:
            with table.update_spec() as update:
                update.add_field("timestamp", DayTransform())
        return results

    export.run(changed)
    assert export.times_ms() == TIMES_MS
    found = export.catalog().load_table(TABLE).scan().plan_files()
    assert sorted(one.file.partition[0] for one in found) == [1, 2]
    assert len(files(export)) == 2
    assert not [path for path in (export.home / "lake" / ".tmp").rglob("*") if path.is_file()]


def test_a_damaged_batch_stops_its_partition_until_it_is_mended(export: TableExport, log: InMemoryLog) -> None:
    whole = bytes(log.records)
    log.records = whole[:-1] + bytes((whole[-1] ^ 1,))
    result = export.run()
    (stopped,) = result.partitions
    assert (result.has_findings, stopped.stopped_at, stopped.records) == (True, 4, 4)
    assert "offset 4" in stopped.reason
    assert export.times_ms() == TIMES_MS[:4]
    log.records = whole
    assert not export.run().has_findings
    assert export.times_ms() == TIMES_MS


@pytest.mark.parametrize("is_table", [True, False])
def test_records_that_are_lost_during_a_task_are_in_the_report(
    export: TableExport, monkeypatch: pytest.MonkeyPatch, is_table: bool
) -> None:
    monkeypatch.setattr(OneLog, "lost", [MissingOffsets(PARTITION, 1, 2), MissingOffsets(PARTITION, 4, 4)])
    if not is_table:
        export.request = replace(export.request, iceberg=None)
    result = export.run()
    assert result.partitions[0].lost == ((1, 2), (4, 4))
    assert result.has_findings
