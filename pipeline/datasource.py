"""The data source `kafka_tiered`: a topic's records as Spark's own Kafka source names them, from both tiers at once.

Planning runs in a Python process of the driver, reading in those of the executors: a reader is pickled, so it holds
settings and nothing that is open. Spark prunes no columns of a Python source: a schema of fewer columns, or the option
`columns`, does, and what is not asked for is never decoded.

Filters are pushed down with the option `pushdown` alone. Spark 4.3 keeps what was planned last with what `load()` gave
(`PythonDataSourceV2.readInfo`): another query over the same DataFrame, or another use of it within one query, would
read what was narrowed for the first. So the option is for a DataFrame that is loaded for one query and used in it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pipeline.decode.record_columns import ALL_COLUMNS, KAFKA_COLUMNS, RecordColumns
from pipeline.options import OptionError, ReadOptions, column_options, parse_options
from pipeline.pushed_filters import Wanted, push
from pipeline.range_read import RangeReader
from pipeline.read_plan import Gap, ReadRange, RemoteRange, tasks_of
from pipeline.tiered_log import LogBounds, TieredLog, open_log, report_data_loss
from pipeline.worker import worker
from tiers.metadata.quick_values import making_many
from tiers.model.ids import TopicIdPartition

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.stream import TieredStreamReader

NAME = "kafka_tiered"

_TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}


class ReadTask(InputPartition):
    """What one task reads: small, for it is pickled. `cluster_id` as the store's object keys have it."""

    def __init__(self, cluster_id: str, ranges: tuple[ReadRange, ...]) -> None:
        super().__init__(None)
        self.cluster_id = cluster_id
        self.ranges = ranges


def spark_schema(names: Iterable[str]) -> StructType:
    """Raises `OptionError` for a column that there is not."""
    try:
        return StructType([StructField(name, _TYPES[name]) for name in RecordColumns(tuple(names)).names])
    except ValueError as error:
        raise OptionError(str(error)) from None


def columns_of(schema: StructType) -> RecordColumns:
    """Of a schema that a user gave. Raises `OptionError` for a column that there is not, or of another type."""
    expected = spark_schema(schema.names)
    for given, known in zip(schema.fields, expected.fields, strict=True):
        if given.dataType != known.dataType:
            what = f"{known.dataType.simpleString()}, not {given.dataType.simpleString()}"
            raise OptionError(f"the column {given.name} is {what}")
    return RecordColumns(tuple(schema.names))


class KafkaTieredDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        include_headers, names = column_options(self.options)
        return spark_schema(names or (ALL_COLUMNS if include_headers else KAFKA_COLUMNS).names)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_options(self.options, is_streaming=False)
        return PushingTieredReader(options, schema) if options.pushes_filters else TieredReader(options, schema)

    def streamReader(self, schema: StructType) -> TieredStreamReader:
        from pipeline.stream import TieredStreamReader  # which is made of what is here

        return TieredStreamReader(parse_options(self.options, is_streaming=True), schema)


class TieredReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns_of(schema)
        self._wanted = Wanted()

    def partitions(self) -> Sequence[InputPartition]:
        return worker().run(self._plan())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadTask):
            return  # Spark's own, in place of no partition at all
        reader = RangeReader(self._options, partition.cluster_id, self._wanted.min_timestamp_ms)
        yield from reader.read(partition.ranges, self._columns)

    async def _plan(self) -> list[InputPartition]:
        wanted = self._wanted
        async with open_log(self._options) as log:
            bounds = await log.bounds(await log.partitions())
            starting = await log.offsets(self._options.starting, bounds)
            ending = await log.offsets(self._options.ending, bounds)
            asked: dict[TopicIdPartition, tuple[int, int]] = {}
            for partition, each in bounds.items():
                if ending[partition] > each.end:
                    report_data_loss(self._options, f"{partition} ends at {each.end}, below {ending[partition]}")
                end_offset = min(ending[partition], each.end) - 1
                if wanted.has(partition.topic, partition.partition):
                    # What the query does not look at is not missed either.
                    first_offset = max(starting[partition], wanted.first_offset)
                    asked[partition] = first_offset, min(end_offset, wanted.end_offset)
            return tasks_for(self._options, log, bounds, asked, wanted.min_timestamp_ms)


class PushingTieredReader(TieredReader):
    """Spark refuses it where `spark.sql.python.filterPushdown.enabled` is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._wanted, residual = push(filters)
        return residual


def tasks_for(
    options: ReadOptions,
    log: TieredLog,
    bounds: Mapping[TopicIdPartition, LogBounds],
    asked: Mapping[TopicIdPartition, tuple[int, int]],
    min_timestamp_ms: int | None = None,
) -> list[InputPartition]:
    """`asked`: first and last offset, inclusive; the last below the first asks for nothing. Raises `DataLossError`."""
    with making_many():
        ranges: list[ReadRange] = []
        for partition, (first_offset, end_offset) in asked.items():
            for piece in log.ranges(partition, bounds[partition], first_offset, end_offset):
                if isinstance(piece, Gap):
                    report_data_loss(options, f"{partition}: {piece.first_offset} to {piece.end_offset} is gone")
                elif not (isinstance(piece, RemoteRange) and _is_before(piece, min_timestamp_ms)):
                    ranges.append(piece)
        tasks = tasks_of(ranges, options.split_bytes, options.min_partitions, options.max_records_per_partition)
    return [ReadTask(log.cluster_id, task) for task in tasks]


def _is_before(piece: RemoteRange, min_timestamp_ms: int | None) -> bool:
    return min_timestamp_ms is not None and 0 <= piece.segment.max_timestamp_ms < min_timestamp_ms
