"""`tidegate-pipeline sql`: shows the result of one query as a table or as JSON. Spark writes the values."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated

import typer
from pyspark.sql import Column, DataFrame
from pyspark.sql.functions import col, struct, to_json
from pyspark.sql.types import BinaryType, NumericType

from pipeline.commands.common import AsJson, Conf, ConfigFile, job_session, key_values, regular_expression
from pipeline.config import load_pipeline_config
from pipeline.source import sql as job
from pipeline.spark.job import one_job
from tiers.commands.console import TERMINAL, say, show_table

DEFAULT_ROWS = 1_000


def sql(
    config: ConfigFile,
    query: Annotated[str, typer.Argument(help="A query over the views tiered and tiered_segments.")],
    topics: Annotated[
        str | None,
        typer.Option(
            "--topics",
            parser=regular_expression,
            metavar="REGEX",
            help="Matches whole names. Default: all but internal topics, whose names begin with __.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="A data source option; docs/pipeline.md lists them."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="The largest number of rows to show.")] = DEFAULT_ROWS,
    master: Annotated[
        str | None,
        typer.Option("--master", metavar="URL", help="The Spark master. Default: that of spark-submit, else local[*]."),
    ] = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Runs one SQL query over topics in both tiers.

    Records of aborted transactions are read too: --option kafka.isolation.level=read_committed omits them."""
    options = key_values("--option", option)
    load_pipeline_config(config)
    job.check_topics(query, config, topics, options)
    with job_session(master, conf, "sql") as session:
        answer = job.sql(session, query, config, topics, options)
        shown = [_json_row(answer)] if as_json else _cells(answer)
        with one_job(session, "query", None, progress=TERMINAL):
            found = answer.toDF(*_numbers(answer)).limit(rows + 1).select(*shown).collect()
        if as_json:
            typer.echo("[" + ",".join(f"\n  {row[0]}" for row in found[:rows]) + "\n]")
        else:
            numbers = [field.name for field in answer.schema if isinstance(field.dataType, NumericType)]
            show_table(answer.columns, ([_text(cell) for cell in row] for row in found[:rows]), numbers)
        if len(found) > rows:
            say(f"there are more than these {rows} rows: --rows shows more")


def _numbers(answer: DataFrame) -> list[str]:
    """Returns new names of the columns: several columns may have one name, and a name may have dots."""
    return [str(number) for number in range(len(answer.columns))]


def _json_row(answer: DataFrame) -> Column:
    """Raises `BadParameter` if JSON has no form for the rows."""
    if twice := [name for name, times in Counter(answer.columns).items() if times > 1]:
        raise typer.BadParameter(f"several columns are named {', '.join(twice)}: each needs an alias")
    # Spark would write these keys by their internal values.
    if found := re.search(r"map<(array|struct|binary|date|timestamp|interval)", answer.schema.simpleString()):
        raise typer.BadParameter(f"a map has keys of the type {found[1]}: map_entries() makes an array of it")
    names = zip(_numbers(answer), answer.columns, strict=True)
    return to_json(struct(*(col(number).alias(name) for number, name in names)), {"ignoreNullFields": "false"})


def _cells(answer: DataFrame) -> list[Column]:
    """Returns the columns as text, and bytes as they are."""
    return [
        col(number) if isinstance(field.dataType, BinaryType) else col(number).cast("string")
        for number, field in zip(_numbers(answer), answer.schema, strict=True)
    ]


def _text(value: object) -> object:
    if not isinstance(value, bytes | bytearray):
        return value
    text = bytes(value).decode("utf-8", "replace")
    return text if text.isprintable() else "0x" + value.hex()
