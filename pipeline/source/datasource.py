"""The data source `kafka_tiered`: a topic's records from both tiers, with the columns of Spark's own Kafka source.

Planning runs in a Python process of the driver, reading in those of the executors. A reader is pickled, so it holds
settings and no open resources. Spark prunes no columns of a Python source. A user prunes them with a schema of fewer
columns or with the option `columns`; columns that are not asked for are never decoded.

Filters are pushed down only with the option `pushdown`. Spark 4.3 caches the last plan with the result of `load()`
(`PythonDataSourceV2.readInfo`). Another query over the same DataFrame, or a second use within one query, would read
only the range that the first query's filters left. So the option is only for a DataFrame that is loaded for one query
and used once in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from pipeline.decode.record_columns import ALL_COLUMNS, KAFKA_COLUMNS
from pipeline.source.columns import columns_of, spark_schema
from pipeline.source.options import ReadOptions, column_options, parse_options
from pipeline.source.pushed_filters import Wanted, push
from pipeline.source.range_read import RangeReader
from pipeline.source.read_task import ReadTask, tasks_for
from pipeline.source.segments_relation import SegmentsDataSource
from pipeline.source.stream import TieredStreamReader
from pipeline.source.tiered_log import open_log, report_data_loss
from pipeline.worker import worker
from tiers.model.ids import TopicIdPartition

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "kafka_tiered"


class KafkaTieredDataSource(DataSource):
    parallelism = 1
    """The cores of the session. Only the session knows them, and planning runs in another process."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        include_headers, names = column_options(self.options)
        return spark_schema(names or (ALL_COLUMNS if include_headers else KAFKA_COLUMNS).names)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_options(self.options, is_streaming=False, parallelism=self.parallelism)
        return PushingTieredReader(options, schema) if options.pushes_filters else TieredReader(options, schema)

    def streamReader(self, schema: StructType) -> TieredStreamReader:
        options = parse_options(self.options, is_streaming=True, parallelism=self.parallelism)
        return TieredStreamReader(options, schema)


class TieredReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns_of(schema)
        self._wanted = Wanted()

    def partitions(self) -> Sequence[InputPartition]:
        return worker().run(self._plan())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadTask):
            return  # Spark passes a partition of its own when the plan is empty
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
                    # Offsets that the query's filters exclude are no data loss.
                    first_offset = max(starting[partition], wanted.first_offset)
                    asked[partition] = first_offset, min(end_offset, wanted.end_offset)
            return tasks_for(self._options, log, bounds, asked, wanted.min_timestamp_ms)


class PushingTieredReader(TieredReader):
    """A reader that accepts filters. Spark rejects it if `spark.sql.python.filterPushdown.enabled` is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._wanted, residual = push(filters)
        return residual


_ALREADY = "DATA_SOURCE_ALREADY_EXISTS"


def register_data_sources(session: SparkSession) -> None:
    """Registers both data sources and makes `session` the active session. A second call has no effect."""
    # Spark checks whether a name is taken in the active session, so this call makes `session` the active one.
    session.createDataFrame([], "nothing INT")
    context = getattr(session, "sparkContext", None)  # Spark Connect has none
    cores = {} if context is None else {"parallelism": context.defaultParallelism}
    for source in (type("SessionsDataSource", (KafkaTieredDataSource,), cores), SegmentsDataSource):
        try:
            session.dataSource.register(source)
        except AnalysisException as error:
            if error.getCondition() != _ALREADY:
                raise
