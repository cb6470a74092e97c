"""`tidegate-pipeline usage`: shows what the remote tier takes in the store, by topic, partition or day."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from pipeline.commands.common import AsJson, ConfigFile, regular_expression
from pipeline.config import load_pipeline_config
from pipeline.maintenance.usage import UsageBy
from pipeline.maintenance.usage import usage as usage_job
from tiers.commands.console import TERMINAL, show_json, show_table, size_cell


def usage(
    config: ConfigFile,
    by: Annotated[UsageBy, typer.Option("--by", help="The unit of a line.")] = UsageBy.TOPIC,
    topics: Annotated[
        str | None,
        typer.Option(
            "--topics", parser=regular_expression, metavar="REGEX", help="Matches whole names. Default: everything."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Adds up the bytes of the logs in the store, by the metadata alone."""
    lines = asyncio.run(usage_job(load_pipeline_config(config), by, topics, TERMINAL))
    if as_json:
        show_json({"lines": list(map(asdict, lines))})
        return
    headings = ("topic", "partition", "day", "segments", "log", "unfinished")
    rows = [
        [each.topic, each.partition, each.day, each.segments, *map(size_cell, (each.log_bytes, each.unfinished_bytes))]
        for each in lines
    ]
    show_table(headings, rows, headings[3:])
