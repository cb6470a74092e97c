"""`sql`: runs one query over the views `tiered` (records of both tiers) and `tiered_segments` (segments in the
store)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from pipeline.source.datasource import NAME as RECORDS
from pipeline.source.datasource import register_data_sources
from pipeline.source.segments_relation import NAME as SEGMENTS

VIEWS = {"tiered": RECORDS, "tiered_segments": SEGMENTS}


def sql(
    session: SparkSession, query: str, config: Path, topics: str, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Returns the query's DataFrame without reading records. `topics` is a pattern for whole names, `options` are those
    of the data source."""
    register_data_sources(session)
    for view, source in VIEWS.items():
        if re.search(rf"\b{view}\b", query, re.IGNORECASE):  # creating a view starts a Python process
            reader = session.read.format(source).option("config", str(config)).option("subscribePattern", topics)
            reader.options(**(options or {})).load().createOrReplaceTempView(view)
    return session.sql(query)
