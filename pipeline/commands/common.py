"""What the jobs' commands have in common: their options, and the Spark session that each of them runs in.

A command is `def NAME(config: ConfigFile, ..., master: Master = None, conf: Conf = None, as_json: AsJson = False)`: it
loads the file, opens the session, calls the job's function, shows the result, and ends by `findings` if there were any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from pyspark.sql import SparkSession

from pipeline.session import open_session
from tiers.console import FINDINGS, AsJson, ConfigFile

__all__ = ["AsJson", "Conf", "ConfigFile", "Master", "findings", "job_session", "spark_conf"]

Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Of Spark. Else what spark-submit says, or local[*]."),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark; as often as you like."),
]


def spark_conf(pairs: Sequence[str] | None) -> dict[str, str]:
    """Raises `typer.BadParameter`."""
    conf = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.startswith("spark."):
            raise typer.BadParameter(f"--conf: expected spark.KEY=VALUE, not {pair!r}")
        conf[key] = value
    return conf


@contextmanager
def job_session(master: str | None, conf: Sequence[str] | None, job: str) -> Iterator[SparkSession]:
    """Of the options; stopped at the end, unless it was there before."""
    with open_session(master, spark_conf(conf), f"tidegate {job}") as session:
        yield session


def findings(any_found: object) -> None:
    """Ends the command with exit code 1 if there were any; when everything has been shown."""
    if any_found:
        raise typer.Exit(FINDINGS)
