"""Records are divided by the partition values of a table, and each data file has its value and its statistics."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import parse_transform
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    IcebergType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
    TimeType,
)
from pyiceberg.utils.datetime import days_to_years, micros_to_months

from pipeline.decode.record_columns import KAFKA_COLUMNS
from pipeline.export import parquet_writer
from pipeline.export.parquet_writer import write_parquet, write_parts
from pipeline.export.table_format import PartitionValueError, TableFormat

DAY_US = 86_400_000_000
FAR_FUTURE_US = 1_700_000_000_000_000_000
"""In November of the year 55840."""
YEAR_1_US = -719_162 * DAY_US
ORDER = StructType(NestedField(10, "day", DateType()), NestedField(11, "price", DecimalType(9, 2)))
COLUMNS: dict[str, tuple[IcebergType, pa.DataType]] = {
    "key": (BinaryType(), pa.binary()),
    "topic": (StringType(), pa.string()),
    "offset": (LongType(), pa.int64()),
    "timestamp": (TimestamptzType(), pa.timestamp("us", "UTC")),
    "weight": (DoubleType(), pa.float64()),
    "noon": (TimeType(), pa.time32("s")),
    "value": (ORDER, pa.struct([("day", pa.date32()), ("price", pa.decimal128(9, 2))])),
}
SCHEMA = Schema(*(NestedField(number, name, kind) for number, (name, (kind, _)) in enumerate(COLUMNS.items(), 1)))
ARROW = pa.schema([(name, kind) for name, (_, kind) in COLUMNS.items()])


def format_of(**transforms: str) -> TableFormat:
    fields = (
        PartitionField(
            SCHEMA.find_field(name.replace("__", ".")).field_id, number, parse_transform(transform), f"p{number}"
        )
        for number, (name, transform) in enumerate(transforms.items(), 1000)
    )
    made = TableFormat(SCHEMA, PartitionSpec(*fields), {})
    copy: TableFormat = pickle.loads(pickle.dumps(made))
    return copy


def batch_of(**columns: list[Any]) -> pa.RecordBatch:
    rows = len(next(iter(columns.values())))
    columns = {"offset": list(range(rows)), **columns}
    arrays = [pa.array(columns.get(name, [None] * rows), kind) for name, (_, kind) in COLUMNS.items()]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW)


def divided(table: TableFormat, batch: pa.RecordBatch) -> dict[tuple[Any, ...], list[int]]:
    return {values: part["offset"].to_pylist() for values, part in table.parts(batch)}


@pytest.mark.parametrize(
    ("transform", "column", "values", "expected"),
    [
        ("day", "timestamp", [-1, None, DAY_US], {(-1,): [0], (None,): [1], (1,): [2]}),
        ("day", "timestamp", [5, 6], {(0,): [0, 1]}),
        ("month", "timestamp", [FAR_FUTURE_US, None, -1], {(646_450,): [0], (None,): [1], (-1,): [2]}),
        ("year", "timestamp", [FAR_FUTURE_US, YEAR_1_US - 1, -1], {(53_870,): [0], (-1970,): [1], (-1,): [2]}),
        ("hour", "timestamp", [0, DAY_US], {(0,): [0], (24,): [1]}),
        ("bucket[4]", "key", [b"a", b"b", b"a", None], {(2,): [0, 2], (3,): [1], (None,): [3]}),
        ("truncate[2]", "topic", ["abc", "abd", "b"], {("ab",): [0, 1], ("b",): [2]}),
        ("identity", "weight", [1.0, 2.0, 1.0], {(1.0,): [0, 2], (2.0,): [1]}),
        ("identity", "noon", [7, 7], {(7_000_000,): [0, 1]}),
        ("void", "topic", ["a", "b"], {(None,): [0, 1]}),
        ("identity", "value__day", [{"day": date(1970, 1, 3)}, None], {(2,): [0], (None,): [1]}),
        ("identity", "value__price", [{"price": Decimal("1.50")}], {(Decimal("1.50"),): [0]}),
    ],
)
def test_records_are_divided_by_partition_value(
    transform: str, column: str, values: list[Any], expected: dict[tuple[Any, ...], list[int]]
) -> None:
    assert divided(format_of(**{column: transform}), batch_of(**{column.partition("__")[0]: values})) == expected


@given(st.integers(YEAR_1_US, 2_932_897 * DAY_US - 1))
def test_months_and_years_are_those_of_pyiceberg(time_us: int) -> None:
    batch = batch_of(timestamp=[time_us], value=[{"day": time_us // DAY_US}])
    ((found, _),) = format_of(timestamp="month", value__day="year").parts(batch)
    assert found == (micros_to_months(time_us), days_to_years(time_us // DAY_US))


def test_a_partition_may_have_several_fields_and_no_record_is_lost() -> None:
    """NaN equals nothing."""
    batch = batch_of(timestamp=[0, DAY_US, 0], topic=["a", "a", "b"])
    expected = {(0, "a"): [0], (1, "a"): [1], (0, "b"): [2]}
    assert divided(format_of(timestamp="day", topic="identity"), batch) == expected
    batch = batch_of(weight=[float("nan"), 1.0, float("nan"), None])
    parts = [part["offset"].to_pylist() for _, part in format_of(weight="identity").parts(batch)]
    assert sorted(itertools.chain.from_iterable(parts)) == [0, 1, 2, 3]


def test_a_record_without_a_place_is_named_by_its_partition_field() -> None:
    with pytest.raises(PartitionValueError, match=r"truncate.3. of timestamp cannot be computed"):
        list(format_of(timestamp="truncate[3]").parts(batch_of(timestamp=[2**62])))


def test_a_data_file_has_its_partition_and_statistics(tmp_path: Path) -> None:
    table = format_of(timestamp="day")
    batches = [batch_of(timestamp=[0, DAY_US, 1]), batch_of(timestamp=[DAY_US, DAY_US])]
    parts = write_parts(tmp_path, batches, ARROW, table.parts)
    assert [(part.values, part.records) for part in parts] == [((0,), 2), ((1,), 3)]
    made = [pickle.loads(pickle.dumps(table.data_file(part, f"s3://lake/{part.path.name}"))) for part in parts]
    assert [(one.file_path, list(one.partition._data), one.record_count) for one in made] == [
        ("s3://lake/0.parquet", [0], 2),
        ("s3://lake/1.parquet", [1], 3),
    ]
    offset = SCHEMA.find_field("offset").field_id
    assert [one.upper_bounds[offset] for one in made] == [(2).to_bytes(8, "little"), (1).to_bytes(8, "little")]
    assert [one.file_size_in_bytes for one in made] == [part.path.stat().st_size for part in parts]


def test_each_value_has_one_file_and_few_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writer, "MAX_OPEN_FILES", 2)
    most = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for start in range(0, 20, 5):
            yield batch_of(offset=[*range(start, start + 5)], timestamp=[day * DAY_US for day in range(5)])
            most = max(most, len(open_files(tmp_path)))

    parts = write_parts(tmp_path, batches(), ARROW, format_of(timestamp="day").parts)
    assert [part.values for part in parts] == [(day,) for day in range(5)]
    for day, part in enumerate(parts):
        assert pq.read_table(part.path)["offset"].to_pylist() == [day, day + 5, day + 10, day + 15]
    assert most == 3  # that of the records that wait, too
    assert sorted(tmp_path.iterdir()) == [part.path for part in parts]


def open_files(folder: Path) -> list[Path]:
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if link.is_relative_to(folder)]


def rows_from(first: int, count: int) -> pa.RecordBatch:
    rows = [{"value": b"v" * 100, "partition": 0, "offset": offset} for offset in range(first, first + count)]
    return pa.RecordBatch.from_pylist(rows, schema=KAFKA_COLUMNS.schema)


def test_batches_are_put_together_into_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_BYTES", 3 * rows_from(0, 10).nbytes)
    batches = [rows_from(first, 10) for first in range(0, 80, 10)]
    assert write_parquet(tmp_path / "x", batches, KAFKA_COLUMNS.schema) == 80
    metadata = pq.read_metadata(tmp_path / "x")
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [30, 30, 20]
    assert pq.read_table(tmp_path / "x") == pa.Table.from_batches(batches)
    offsets = metadata.row_group(1).column(KAFKA_COLUMNS.names.index("offset")).statistics
    assert (offsets.min, offsets.max) == (30, 59)


def test_the_row_groups_of_all_open_files_have_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_BYTES", 3 * rows_from(0, 10).nbytes)
    batches = [rows_from(first, 10) for first in range(0, 80, 10)]
    parts = write_parts(tmp_path, batches, KAFKA_COLUMNS.schema, lambda batch: [((), batch[:5]), ((1,), batch[5:])])
    assert [(part.values, part.records) for part in parts] == [((), 40), ((1,), 40)]
    for part in parts:
        metadata = pq.read_metadata(part.path)
        assert max(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)) <= 30
        assert metadata.num_row_groups > 1
