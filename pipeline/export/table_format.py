"""`TableFormat`: the columns and partitions of an Iceberg table. It travels to the tasks, which write its data files.

A data file holds the records of one partition value, in the table's current partition spec. Its entry in the manifest
(`DataFile`) has that value and the file's statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import MonthTransform, Transform, YearTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, IcebergType

from pipeline.export.parquet_writer import Part

_METRICS = "write.metadata.metrics."
_DAY_US = 86_400_000_000

logging.getLogger("pyiceberg.io.pyarrow").setLevel(logging.ERROR)  # it warns of each column without statistics


class PartitionValueError(ValueError):
    """A record has no place in the table's partitions. The message is for the user."""


@dataclass(frozen=True, slots=True)
class TableFormat:
    schema: Schema
    spec: PartitionSpec
    metrics: Mapping[str, str]
    """The table's properties that choose statistics."""

    @classmethod
    def of(cls, metadata: TableMetadata) -> TableFormat:
        metrics = {key: value for key, value in metadata.properties.items() if key.startswith(_METRICS)}
        return cls(metadata.schema(), metadata.spec(), metrics)

    def parts(self, batch: pa.RecordBatch) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
        """Yields the records of each partition value, in their order. Raises `PartitionValueError`."""
        if not self.spec.fields:
            yield (), batch
            return
        names = [str(number) for number in range(len(self.spec.fields))]
        keys = pa.table([self._values(batch, field) for field in self.spec.fields], names)
        rows = keys.append_column("rows", pa.array(range(batch.num_rows), pa.int32()))
        groups = rows.group_by(names, use_threads=False).aggregate([("rows", "list")])
        for number, values in enumerate(groups.select(names).to_pylist()):
            part = batch if groups.num_rows == 1 else batch.take(groups["rows_list"][number].values)
            yield tuple(values.values()), part

    def _values(self, batch: pa.RecordBatch, field: PartitionField) -> pa.Array:
        """Returns the partition value of each record."""
        name = self.schema.find_column_name(field.source_id) or ""
        try:
            column, *below = name.split(".")
            found = _internal(pc.struct_field(batch.column(column), below) if below else batch.column(column))
            transform = _transform(field.transform, self.schema.find_type(field.source_id))
            if pa.types.is_integer(found.type) and field.transform.preserves_order and not found.null_count:
                # The records of a batch are of one day, as a rule. This avoids a call for each of them.
                least, most = pc.min_max(found).as_py().values()
                if least is not None and (value := transform(least)) == transform(most):
                    return pa.repeat(value, len(found))
            encoded = found.dictionary_encode()
            values = pa.array([transform(value) for value in encoded.dictionary.to_pylist()])
            taken = values.take(encoded.indices)
        except (ArithmeticError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
            raise PartitionValueError(f"{field.transform} of {name} cannot be computed: {error}") from error
        return taken.cast(pa.int32()) if pa.types.is_null(taken.type) else taken

    def data_file(self, part: Part, uri: str) -> DataFile:
        """Describes a written file that will be at `uri`."""
        statistics = data_file_statistics_from_parquet_metadata(
            pq.read_metadata(part.path),
            compute_statistics_plan(self.schema, dict(self.metrics)),
            parquet_path_to_id_mapping(self.schema),
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=uri,
            file_format=FileFormat.PARQUET,
            partition=Record(*part.values),
            file_size_in_bytes=part.path.stat().st_size,
            **statistics.to_serialized_dict(),
        )


def _transform(transform: Transform[Any, Any], source: IcebergType) -> Callable[[Any], Any]:
    """Returns pyiceberg's own function, or another one where that knows only the years from 1 to 9999."""
    match transform:
        case MonthTransform():
            unit = "M"
        case YearTransform():
            unit = "Y"
        case _:
            return transform.transform(source)
    units_of_a_day = 1 if isinstance(source, DateType) else _DAY_US

    def since_1970(value: int | None) -> int | None:
        if value is None:
            return None
        return int(np.datetime64(value // units_of_a_day, "D").astype(f"datetime64[{unit}]").astype(np.int64))

    return since_1970


def _internal(values: pa.Array) -> pa.Array:
    """Converts dates and times to the numbers that Iceberg's transforms take."""
    kind = values.type
    if pa.types.is_timestamp(kind):
        return values.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    if pa.types.is_time(kind):
        return values.cast(pa.time64("us")).cast(pa.int64())
    return values.cast(pa.int32()) if pa.types.is_date32(kind) else values
