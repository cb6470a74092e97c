"""The command `tidegate-pipeline`. What goes wrong is said in one line.

Exit codes: 0 good, 1 findings, 2 misused, 3 failed, 130 interrupted.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import typer
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.logger import PySparkLogger

from pipeline.commands.export import export
from pipeline.commands.merge import merge
from pipeline.commands.offload import offload
from pipeline.commands.package import package
from pipeline.commands.rebuild import rebuild
from pipeline.commands.retain import retain
from pipeline.commands.scrub import scrub
from pipeline.commands.sql import sql
from pipeline.commands.usage import usage
from pipeline.commands.warm import warm
from pipeline.job import JobError, spark_cause
from pipeline.session import SparkSettingError
from tiers.broker.tls import TlsError
from tiers.errors import BrokerRefusedError, RemoteLogError
from tiers.open_tier import RemoteTierError
from tiers.tier_config import ConfigError

logger = logging.getLogger(__name__)

MISUSED: Final = 2
FAILED: Final = 3
INTERRUPTED: Final = 130

_USERS_OWN = ("OptionError: ", "ConfigError: ")

app = typer.Typer(
    name="tidegate-pipeline",
    help="Jobs on Spark over the remote tier of a Kafka cluster.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _pipeline() -> None:
    """Jobs on Spark over the remote tier of a Kafka cluster."""


# One line each; the name of the function is that of the command.
app.command()(offload)
app.command()(export)
app.command()(merge)
app.command()(package)
app.command()(rebuild)
app.command()(retain)
app.command()(scrub)
app.command()(sql)
app.command()(usage)
app.command()(warm)


def run(arguments: list[str]) -> int:
    """The exit code; every failure is a line on standard error."""
    logging.basicConfig(level=logging.CRITICAL)
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):  # say again what the error says
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    try:
        result = app(arguments, standalone_mode=False, prog_name="tidegate-pipeline")
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        return _explain(error)
    return result if isinstance(result, int) else 0


def _explain(error: Exception) -> int:
    match error:
        case ExceptionGroup(exceptions=(only,)):
            return _explain(only)
        case ConfigError() | SparkSettingError():
            return _say(str(error), MISUSED)
        case AnalysisException():
            # Where a data source's Python failed, Spark says this too.
            cause = spark_cause(error)
            return _say(cause, FAILED if "Traceback" in str(error) and not cause.startswith(_USERS_OWN) else MISUSED)
        case PySparkException() | Py4JError():
            return _say(spark_cause(error), FAILED)
        case OSError(strerror=str(reason), filename=str() | Path() as file):
            return _say(f"{file}: {reason}", FAILED)
        case OSError():
            return _say(error.strerror or str(error), FAILED)
        case JobError() | RemoteTierError() | RemoteLogError() | TlsError() | BrokerRefusedError():
            return _say(str(error), FAILED)
    # Click's own complaints about the command line; typer does not export their base class.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return _say(error.format_message(), MISUSED)
    logger.debug("what led to the internal error", exc_info=error)
    return _say(f"internal error: {type(error).__name__}: {error}", FAILED)


def _say(message: str, code: int) -> int:
    """In one line, whatever the libraries below make of it."""
    typer.echo("tidegate-pipeline: " + " ".join(message.split()), err=True)
    return code
