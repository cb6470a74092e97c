"""The options that the commands share, their parsers, and what runs the tasks of a command.

A command is `def NAME(config: ConfigFile, ..., master: Master = None, conf: Conf = None, as_json: AsJson = False)`. It
loads the file, opens a session or a runner, calls the job's function and shows the result. If there were findings, it
ends with `findings`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.process_runner import ProcessRunner
from tiers.commands.console import FINDINGS, TERMINAL, AsJson, ConfigFile
from tiers.commands.quantities import duration_ms, size_bytes
from tiers.upkeep.runner import Runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "AsJson",
    "Conf",
    "ConfigFile",
    "Master",
    "duration_ms",
    "findings",
    "job_runner",
    "job_session",
    "key_values",
    "regular_expression",
    "size_bytes",
]

Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Runs the tasks on Spark, with this master. Default: in processes here, or on the Spark of spark-submit.",
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="A Spark setting; may be repeated."),
]


def key_values(option: str, pairs: Sequence[str] | None, prefix: str = "") -> dict[str, str]:
    """Parses repeated `KEY=VALUE` options. Raises `typer.BadParameter`."""
    found = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key or not key.startswith(prefix):
            raise typer.BadParameter(f"{option}: expected {prefix}KEY=VALUE, not {key!r}")
        if key in found:
            raise typer.BadParameter(f"{option}: {key} is given more than once")
        found[key] = value
    return found


def regular_expression(text: str) -> str:
    """Returns `text` unchanged. Raises `typer.BadParameter` if it does not compile."""
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is not a regular expression: {error}") from error
    return text


@contextmanager
def job_session(master: str | None, conf: Sequence[str] | None, job: str) -> Iterator[SparkSession]:
    """Yields a Spark session with the given options, and stops it at the end if this call started it."""
    from pyspark.logger import PySparkLogger  # not needed without Spark, and slow

    from pipeline.spark.session import open_session

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):  # these only repeat the error
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    with open_session(master, key_values("--conf", conf, "spark."), f"tidegate {job}") as session:
        yield session


@contextmanager
def job_runner(master: str | None, conf: Sequence[str] | None, job: str) -> Iterator[Runner]:
    """Yields a runner: Spark if the user or spark-submit names it, else processes of this machine."""
    if master is None and not conf and "PYSPARK_GATEWAY_PORT" not in os.environ:
        with ProcessRunner(TERMINAL) as runner:
            yield runner
        return
    from pipeline.spark.runner import SparkRunner  # not needed without Spark, and slow

    with job_session(master, conf, job) as session:
        yield SparkRunner(session, TERMINAL)


def findings(any_found: object) -> None:
    """Ends the command with exit code 1 if `any_found` is true. Call it after everything has been shown."""
    if any_found:
        raise typer.Exit(FINDINGS)
