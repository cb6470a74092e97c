"""Parquet files have row groups of a bounded size."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.decode.record_columns import KAFKA_COLUMNS
from pipeline.export import parquet_writer
from pipeline.export.parquet_writer import write_parquet, write_parts


def batch_of(first: int, count: int) -> pa.RecordBatch:
    rows = [{"value": b"v" * 100, "partition": 0, "offset": offset} for offset in range(first, first + count)]
    return pa.RecordBatch.from_pylist(rows, schema=KAFKA_COLUMNS.schema)


def test_batches_are_put_together_into_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_BYTES", 3 * batch_of(0, 10).nbytes)
    batches = [batch_of(first, 10) for first in range(0, 80, 10)]
    assert write_parquet(tmp_path / "x", batches, KAFKA_COLUMNS.schema) == 80
    metadata = pq.read_metadata(tmp_path / "x")
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [30, 30, 20]
    assert pq.read_table(tmp_path / "x") == pa.Table.from_batches(batches)
    offsets = metadata.row_group(1).column(KAFKA_COLUMNS.names.index("offset")).statistics
    assert (offsets.min, offsets.max) == (30, 59)


def test_a_file_may_be_empty(tmp_path: Path) -> None:
    assert write_parquet(tmp_path / "x", [], KAFKA_COLUMNS.schema) == 0
    assert pq.read_table(tmp_path / "x").num_rows == 0


def test_the_row_groups_of_all_open_files_have_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_BYTES", 3 * batch_of(0, 10).nbytes)
    batches = [batch_of(first, 10) for first in range(0, 80, 10)]
    parts = write_parts(tmp_path, batches, KAFKA_COLUMNS.schema, lambda batch: [((), batch[:5]), ((1,), batch[5:])])
    assert [(part.values, part.records) for part in parts] == [((), 40), ((1,), 40)]
    for part in parts:
        metadata = pq.read_metadata(part.path)
        assert max(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)) <= 30
        assert metadata.num_row_groups > 1
