"""Registers the data sources with a Spark session."""

from __future__ import annotations

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from pipeline.source.datasource import KafkaTieredDataSource
from pipeline.source.segments_relation import SegmentsDataSource

_ALREADY = "DATA_SOURCE_ALREADY_EXISTS"


def register_data_sources(session: SparkSession) -> None:
    """Registers both data sources and makes `session` the active session. A second call has no effect."""
    # Spark checks whether a name is taken in the active session, so this call makes `session` the active one.
    session.createDataFrame([], "nothing INT")
    for source in (KafkaTieredDataSource, SegmentsDataSource):
        try:
            session.dataSource.register(source)
        except AnalysisException as error:
            if error.getCondition() != _ALREADY:
                raise
