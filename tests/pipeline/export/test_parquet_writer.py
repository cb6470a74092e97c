"""Parquet files have row groups of a bounded size, and name the source of their columns."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.decode.record_columns import KAFKA_COLUMNS
from pipeline.export import parquet_writer
from pipeline.export.parquet_writer import write_parquet, written_file


def batch_of(first: int, count: int) -> pa.RecordBatch:
    rows = [{"value": b"v" * 100, "partition": 0, "offset": offset} for offset in range(first, first + count)]
    return pa.RecordBatch.from_pylist(rows, schema=KAFKA_COLUMNS.schema)


def test_batches_are_put_together_into_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_BYTES", 3 * batch_of(0, 10).nbytes)
    batches = [batch_of(first, 10) for first in range(0, 80, 10)]
    assert write_parquet(tmp_path / "x", batches, KAFKA_COLUMNS.schema, "plain") == 80
    metadata = pq.read_metadata(tmp_path / "x")
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [30, 30, 20]
    assert pq.read_table(tmp_path / "x") == pa.Table.from_batches(batches)
    offsets = metadata.row_group(1).column(KAFKA_COLUMNS.names.index("offset")).statistics
    assert (offsets.min, offsets.max) == (30, 59)


def test_a_file_says_its_layout_and_epoch_and_may_be_empty(tmp_path: Path) -> None:
    assert write_parquet(tmp_path / "x", [], KAFKA_COLUMNS.schema, "plain", leader_epoch=7) == 0
    assert written_file((tmp_path / "x").read_bytes()) == ("plain", 7, 0)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "strange")
    assert written_file((tmp_path / "strange").read_bytes()) == ("", -1, 1)
    with pytest.raises(ValueError, match="Parquet"):
        written_file(b"no file of that kind, not at all")
