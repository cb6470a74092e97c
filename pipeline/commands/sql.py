"""`tidegate-pipeline sql`: shows the result of one query as a table or as JSON (bytes in base64, as in Spark)."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import typer
from pyspark.sql import DataFrame, Row
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructField,
    StructType,
)

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
        for reason in _reasons([answer.schema] if as_json else [field.dataType for field in answer.schema]):
            raise typer.BadParameter(reason)
        with one_job(session, "query", None, progress=TERMINAL):
            found = _readable(answer.limit(rows + 1)).collect()
        if as_json:
            typer.echo(json.dumps([plain(row) for row in found[:rows]], indent=2, allow_nan=False))
        else:
            numbers = [field.name for field in answer.schema if isinstance(field.dataType, NumericType)]
            show_table(answer.columns, ([_text(cell) for cell in row] for row in found[:rows]), numbers)
        if len(found) > rows:
            say(f"there are more than these {rows} rows: --rows shows more")


def _reasons(kinds: Iterable[DataType]) -> Iterator[str]:
    """Yields why values of these types cannot be shown."""
    for kind in kinds:
        match kind:
            case ArrayType():
                yield from _reasons([kind.elementType])
            case MapType():
                if isinstance(kind.keyType, ArrayType | StructType):
                    yield f"{kind.simpleString()} has arrays or structs as keys: map_entries() makes an array of it"
                yield from _reasons([kind.valueType])
            case StructType():
                if twice := [name for name, times in Counter(kind.names).items() if times > 1]:
                    yield f"several columns or fields are named {', '.join(twice)}: each needs an alias"
                yield from _reasons(field.dataType for field in kind)


def _readable(answer: DataFrame) -> DataFrame:
    """Returns the answer with Spark's own text for values that Python lacks, such as times after the year 9999."""
    fields = answer.schema.fields
    numbered = answer.toDF(*map(str, range(len(fields))))  # several columns may have one name
    return numbered.select(
        *(numbered[str(at)].cast(_readable_type(each.dataType)).alias(each.name) for at, each in enumerate(fields))
    )


def _readable_type(kind: DataType) -> DataType:
    match kind:
        case ArrayType():
            return ArrayType(_readable_type(kind.elementType), kind.containsNull)
        case MapType():
            return MapType(_readable_type(kind.keyType), _readable_type(kind.valueType), kind.valueContainsNull)
        case StructType():
            return StructType([StructField(each.name, _readable_type(each.dataType), each.nullable) for each in kind])
        case NumericType() | BooleanType() | BinaryType() | NullType():
            return kind
    return StringType()


def _text(value: object) -> object:
    match value:
        case bytes() | bytearray():
            text = bytes(value).decode("utf-8", "replace")
            return text if text.isprintable() else "0x" + value.hex()
        case Row() | list() | Mapping():
            return json.dumps(plain(value))
    return value


def plain(value: object) -> object:
    """Converts a Spark value for JSON. Non-finite numbers and the keys of maps become text."""
    match value:
        case Row():
            return {name: plain(cell) for name, cell in value.asDict().items()}
        case Mapping():
            return {str(plain(key)): plain(cell) for key, cell in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case bytes() | bytearray():
            return base64.b64encode(value).decode()
        case float() if not math.isfinite(value):
            return str(value)
        case None | str() | int() | float():
            return value
    return str(value)
