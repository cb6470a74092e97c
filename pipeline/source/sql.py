"""`sql`: runs one query over the views `tiered` (records of both tiers) and `tiered_segments` (segments in the
store)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from pipeline.chosen_partitions import nothing_chosen
from pipeline.source.datasource import NAME as RECORDS
from pipeline.source.datasource import register_data_sources
from pipeline.source.options import ReadOptions, parse_options, subscription_option
from pipeline.source.segments_relation import NAME as SEGMENTS
from pipeline.source.tiered_log import open_log
from pipeline.worker import worker

VIEWS = {"tiered": RECORDS, "tiered_segments": SEGMENTS}
_PUBLIC = "(?!__).*"
"""A name that begins with `__` is that of an internal topic, such as Tidegate's metadata topic."""


def options_of(source: str, config: Path, topics: str | None, options: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of a data source. `topics` is a pattern for whole names. Without it, and without an option
    that names topics, the records are those of all topics that are not internal.

    Raises `OptionError`."""
    given = {"config": str(config), **options} | ({} if topics is None else {"subscribePattern": topics})
    if subscription_option(given) is None and source == RECORDS:
        given["subscribePattern"] = _PUBLIC
    return given


def check_topics(query: str, config: Path, topics: str | None, options: Mapping[str, str]) -> None:
    """Checks, without Spark, the names of the options and, if the query reads records, that `topics` matches a topic.

    Raises `OptionError`, `ConfigError`, `BrokerError`, and `NothingChosenError` if no topic matches."""
    given = options_of(RECORDS, config, topics, options)
    if topics is not None and _reads("tiered", query):
        worker().run(_require_match(parse_options(given, is_streaming=False), topics))


async def _require_match(options: ReadOptions, topics: str) -> None:
    async with open_log(options) as log:
        known = await log.topics()
    if not options.subscription.topics_among(known):
        raise nothing_chosen("topic that this reader may describe", topics, known)


def sql(session: SparkSession, query: str, config: Path, topics: str | None, options: Mapping[str, str]) -> DataFrame:
    """Returns the query's DataFrame without reading records."""
    register_data_sources(session)
    for view, source in VIEWS.items():
        if _reads(view, query):  # creating a view starts a Python process
            given = options_of(source, config, topics, options)
            session.read.format(source).options(**given).load().createOrReplaceTempView(view)
    return session.sql(query)


def _reads(view: str, query: str) -> bool:
    return re.search(rf"\b{view}\b", query, re.IGNORECASE) is not None
