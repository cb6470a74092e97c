"""PySpark jobs over the remote tier's segments; stands beside `proxy` on `tiers`, neither knows the other.

import pipeline

pipeline.register(spark)
spark.read.format("kafka_tiered").option("config", "tidegate.toml").option("subscribe", "orders").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def register(spark: SparkSession) -> None:
    """Makes `kafka_tiered` and `kafka_tiered_segments` known to the session; more than once does no harm."""
    from pipeline.registration import register_data_sources  # Spark is for those who read

    register_data_sources(spark)


def read(spark: SparkSession, topics: str, columns: str | None = None, **options: str) -> DataFrame:
    """A batch of `topics` (names, with commas). `columns` saves decoding what is not looked at; `options` are those
    of `kafka_tiered`."""
    register(spark)
    reader = spark.read.format("kafka_tiered").option("subscribe", topics).options(**options)
    return (reader if columns is None else reader.option("columns", columns)).load()
