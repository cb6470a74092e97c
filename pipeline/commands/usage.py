"""`tidegate-pipeline usage`: shows what the remote tier takes in the store and costs, by topic, partition or day."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Annotated

import typer

from pipeline.commands.common import AsJson, ConfigFile, regular_expression
from pipeline.config import load_pipeline_config
from pipeline.maintenance.usage import DAY_MS, Prices, UsageBy, UsageLine, UsageReport, day_text, written_objects
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
    price_per_gib_month: Annotated[
        float | None, typer.Option("--price-per-gib-month", min=0, help="The price of a stored GiB.")
    ] = None,
    price_per_1000_requests: Annotated[
        float | None, typer.Option("--price-per-1000-requests", min=0, help="The price of the requests that wrote it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Adds up the bytes of the logs in the store, by the metadata alone."""
    settings = load_pipeline_config(config)
    prices = Prices(price_per_gib_month, price_per_1000_requests)
    report = asyncio.run(usage_job(settings, by, topics, TERMINAL))
    ages = report.ages(time.time_ns() // 1_000_000 // DAY_MS)
    if as_json:
        show_json({"lines": [_json(each, prices) for each in report.lines], "ages": ages})
    else:
        _print(report, prices, ages)


def _json(line: UsageLine, prices: Prices) -> dict[str, object]:
    return {
        **asdict(line),
        "day": day_text(line.day),
        "total_bytes": line.total_bytes,
        "cost_per_month": prices.of_month(line.total_bytes),
        "cost_of_writing": prices.of_requests(written_objects(line)),
    }


def _print(report: UsageReport, prices: Prices, ages: dict[str, int]) -> None:
    headings = ("topic", "partition", "day", "segments", "log", "unfinished", "total", "per month", "to write")
    rows = [
        (
            *(each.topic, each.partition, day_text(each.day), each.segments),
            *map(size_cell, (each.log_bytes, each.unfinished_bytes, each.total_bytes)),
            *(_money(prices.of_month(each.total_bytes)), _money(prices.of_requests(written_objects(each)))),
        )
        for each in report.lines
    ]
    shown = [
        number
        for number, heading in enumerate(headings)
        if heading in ("topic", "total") or any(row[number] is not None for row in rows)
    ]
    show_table(
        [headings[number] for number in shown], ([row[number] for number in shown] for row in rows), headings[3:]
    )
    show_table(("age of the latest record", "size"), ((age, size_cell(size)) for age, size in ages.items()), ("size",))


def _money(cost: float | None) -> str | None:
    return None if cost is None else f"{cost:.4f}"
