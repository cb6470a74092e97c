"""`sql`: one query over topics of both tiers: views `tiered` (records) and `tiered_segments` (what the store has)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import pipeline
from pipeline.source.datasource import NAME as RECORDS
from pipeline.source.segments_relation import NAME as SEGMENTS

VIEWS = {"tiered": RECORDS, "tiered_segments": SEGMENTS}


def sql(
    session: SparkSession, query: str, config: Path, topics: str, options: Mapping[str, str] | None = None
) -> DataFrame:
    """`topics` is a pattern for whole names, `options` are those of the data source. Records are not read yet."""
    pipeline.register(session)
    for view, source in VIEWS.items():
        if re.search(rf"\b{view}\b", query, re.IGNORECASE):  # a view takes a Python process and a moment
            reader = session.read.format(source).option("config", str(config)).option("subscribePattern", topics)
            reader.options(**(options or {})).load().createOrReplaceTempView(view)
    return session.sql(query)
