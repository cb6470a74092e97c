"""What the jobs' commands have in common: their options, and the Spark session that each of them runs in.

A command is `def NAME(config: ConfigFile, ..., master: Master = None, conf: Conf = None, as_json: AsJson = False)`: it
loads the file, opens the session, calls the job's function, shows the result, and ends by `findings` if there were any.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from pipeline.session import open_session
from tiers.console import FINDINGS, AsJson, ConfigFile

__all__ = ["AsJson", "Conf", "ConfigFile", "Master", "findings", "job_session", "key_values", "regular_expression"]

Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Of Spark. Else what spark-submit says, or local[*]."),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark; as often as you like."),
]


def key_values(option: str, pairs: Sequence[str] | None, prefix: str = "") -> dict[str, str]:
    """Raises `typer.BadParameter`."""
    found = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key or not key.startswith(prefix):
            raise typer.BadParameter(f"{option}: expected {prefix}KEY=VALUE, not {key!r}")
        found[key] = value
    return found


def regular_expression(text: str) -> str:
    """As it is. Raises `typer.BadParameter`."""
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is no regular expression: {error}") from error
    return text


@contextmanager
def job_session(master: str | None, conf: Sequence[str] | None, job: str) -> Iterator[SparkSession]:
    """Of the options; stopped at the end, unless it was there before."""
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):  # say again what the error says
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    with open_session(master, key_values("--conf", conf, "spark."), f"tidegate {job}") as session:
        yield session


def findings(any_found: object) -> None:
    """Ends the command with exit code 1 if there were any; when everything has been shown."""
    if any_found:
        raise typer.Exit(FINDINGS)
