"""The command `tidegate-pipeline`. What goes wrong is said in one line.

Exit codes: 0 good, 1 findings, 2 misused, 3 failed, 130 interrupted. Spark, Arrow and pyiceberg take seconds to load:
only the one command that is called loads what it needs.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any, Final

import typer
from typer.core import TyperGroup

FAILED: Final = 3
INTERRUPTED: Final = 130

COMMANDS: Final[Mapping[str, str]] = {
    "offload": "Copies what the brokers have to the remote tier.",
    "export": "Exports a topic to Parquet or Iceberg, each record once.",
    "scrub": "Checks everything in the store, finds orphans.",
    "usage": "Adds up the bytes that the tier takes in the store.",
    "rebuild": "Restores metadata or indexes from what the store has.",
    "merge": "Makes few large segments of many small ones.",
    "retain": "Deletes what retention no longer covers.",
    "sql": "Answers one SQL query over topics of both tiers.",
    "warm": "Compiles the decoder ahead of the first job.",
    "package": "Writes what spark-submit takes.",
}
"""Each is a function of its own name in a module of that name."""

_EXTRAS: Final = {
    "pyspark": "pipeline",
    "py4j": "pipeline",
    "pyarrow": "pipeline",
    "numpy": "pipeline",
    "pyiceberg": "iceberg",
}
_STYLE: Final[Mapping[str, Any]] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.add_command(_loaded(args[0]))
        return super().resolve_command(ctx, args)


def _loaded(name: str) -> Any:
    only = typer.Typer(**_STYLE)
    only.command(name)(getattr(importlib.import_module(f"pipeline.commands.{name}"), name))
    return typer.main.get_command(only)


def _not_loaded() -> None:
    """Stands for a command in the list of all."""


app = typer.Typer(
    cls=_Commands,
    name="tidegate-pipeline",
    help="Jobs on Spark over the remote tier of a Kafka cluster.",
    no_args_is_help=False,
    **_STYLE,
)
for _name, _about in COMMANDS.items():
    app.command(_name, short_help=_about)(_not_loaded)


@app.callback()
def _pipeline() -> None:
    """Jobs on Spark over the remote tier of a Kafka cluster."""


def run(arguments: list[str]) -> int:
    """The exit code; every failure is a line on standard error."""
    logging.basicConfig(level=logging.CRITICAL)
    try:
        result = app(arguments, standalone_mode=False, prog_name="tidegate-pipeline")
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        return _say(*_explained(error))
    return result if isinstance(result, int) else 0


def _explained(error: Exception) -> tuple[str, int]:
    try:
        if isinstance(error, ModuleNotFoundError):
            raise error
        from pipeline.failures import explain  # knows Spark's errors, hence loads it
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in _EXTRAS:
            return f"{package} is missing: pip install 'tidegate[{_EXTRAS[package]}]'", FAILED
        return f"internal error: {missing}", FAILED
    return explain(error)


def _say(message: str, code: int) -> int:
    """In one line, whatever the libraries below make of it."""
    typer.echo("tidegate-pipeline: " + " ".join(message.split()), err=True)
    return code
