"""Makes the data sources known to a Spark session."""

from __future__ import annotations

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from pipeline.datasource import KafkaTieredDataSource, KafkaTieredDataSourceWithoutPushdown
from pipeline.segments_relation import SegmentsDataSource

_ALREADY = "DATA_SOURCE_ALREADY_EXISTS"


def register_data_sources(session: SparkSession) -> None:
    """A second time in one JVM is no error. Whether filters are pushed down is the session's setting as of now."""
    pushes = session.conf.get("spark.sql.python.filterPushdown.enabled", "false") == "true"
    sources: list[type[DataSource]] = [
        KafkaTieredDataSource if pushes else KafkaTieredDataSourceWithoutPushdown,
        SegmentsDataSource,
    ]
    for source in sources:
        try:
            session.dataSource.register(source)
        except AnalysisException as error:
            if error.getCondition() != _ALREADY:
                raise
