"""Makes the data sources known to a Spark session."""

from __future__ import annotations

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from pipeline.source.datasource import KafkaTieredDataSource
from pipeline.source.segments_relation import SegmentsDataSource

_ALREADY = "DATA_SOURCE_ALREADY_EXISTS"


def register_data_sources(session: SparkSession) -> None:
    """A second time in one session is no error. Makes `session` the active one."""
    # Whether the name is taken already, Spark looks up in the session that is active: this makes it the one meant.
    session.createDataFrame([], "nothing INT")
    for source in (KafkaTieredDataSource, SegmentsDataSource):
        try:
            session.dataSource.register(source)
        except AnalysisException as error:
            if error.getCondition() != _ALREADY:
                raise
