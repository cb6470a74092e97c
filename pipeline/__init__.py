"""PySpark jobs and Spark data sources over the remote tier's segments.

The package builds on `tiers`, as `proxy` does; `pipeline` and `proxy` never import each other.

import pipeline

pipeline.register(spark)
spark.read.format("kafka_tiered").option("config", "tidegate.toml").option("subscribe", "orders").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def register(spark: SparkSession) -> None:
    """Registers `kafka_tiered` and `kafka_tiered_segments` with the session. A second call has no effect."""
    from pipeline.source.datasource import register_data_sources  # imports Spark, which other users do not need

    register_data_sources(spark)


def read(spark: SparkSession, topics: str, columns: str | None = None, **options: str) -> DataFrame:
    """Returns a batch DataFrame of `topics` (comma-separated names).

    `columns` limits which columns are decoded. `options` are the options of `kafka_tiered`."""
    register(spark)
    reader = spark.read.format("kafka_tiered").option("subscribe", topics).options(**options)
    return (reader if columns is None else reader.option("columns", columns)).load()
