"""The public Python package of Tidegate: `read` and `__version__`. All other packages are internal.

    import tidegate

    orders = tidegate.read(spark, "orders", config="tidegate.toml")

`import tidegate` imports neither Spark nor the internal packages. The first call of `read` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    __version__: str

__all__ = ["__version__", "read"]


def __getattr__(name: str) -> str:
    """Returns `__version__`. The programs import this package too, and a signal ends them until they hold it."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "unknown"


def read(
    spark: SparkSession, topics: str, columns: str | None = None, *, stream: bool = False, **options: str
) -> DataFrame:
    """Returns a DataFrame with the records of `topics` (names, separated by commas) in both tiers.

    `columns` names the columns to decode, separated by commas. `stream=True` returns a streaming DataFrame. `options`
    are those of the data source `kafka_tiered` (docs/pipeline.md, "Options"). From the first call on, the session also
    has the formats `kafka_tiered` and `kafka_tiered_segments`.

    Raises `ImportError` if the extra `pipeline` is missing or of an unsupported release, or if another package hides
    one of Tidegate's. Raises `TypeError` if `options` name the topics again."""
    from tidegate.own_packages import check_packages

    check_packages("protocol", "tiers", "pipeline")
    try:
        from pipeline.source.datasource import NAME, register_data_sources
    except ImportError as missing:
        from pipeline.extras import what_to_install

        raise ImportError(what_to_install(missing) or str(missing)) from missing
    register_data_sources(spark)
    reader = spark.readStream if stream else spark.read
    chosen = {} if columns is None else {"columns": columns}
    return reader.format(NAME).options(subscribe=topics, **chosen, **options).load()
