"""The command `tidegate-pipeline`. It reports every failure in one line.

Exit codes: 0 success, 1 findings, 2 usage error, 3 failure, 130 ended by SIGINT or SIGTERM, 141 the reader of the
output ended. Spark, Arrow and pyiceberg take seconds to import, so the program imports only the command that is called.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any, Final

import typer

from pipeline.extras import what_to_install
from tiers.commands.program import OnceGroup, Program, exit_code

FAILED: Final = 3

COMMANDS: Final[Mapping[str, str]] = {
    "offload": "Copies log data from the brokers to the remote tier.",
    "export": "Exports a topic to Parquet or Iceberg, each record exactly once.",
    "scrub": "Checks every object in the store and finds orphans.",
    "usage": "Adds up the bytes of the logs in the tier.",
    "rebuild": "Rebuilds metadata or indexes from the objects in the store.",
    "merge": "Merges many small segments into few large ones.",
    "sql": "Runs one SQL query over topics in both tiers.",
    "warm": "Compiles the decoder ahead of the first job.",
    "package": "Writes the files that spark-submit needs.",
}
"""Each command is a function in a module of `pipeline.commands`; both have the command's name."""

_STYLE: Final[Mapping[str, Any]] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}


class _Commands(OnceGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.add_command(_loaded(args[0]))
        return super().resolve_command(ctx, args)


def _loaded(name: str) -> Any:
    only = Program(**_STYLE)
    only.command(name)(getattr(importlib.import_module(f"pipeline.commands.{name}"), name))
    return typer.main.get_command(only)


def _not_loaded() -> None:
    """Stands in for a command in the list of commands, so that listing them imports none of them."""


app = Program(
    cls=_Commands,
    name="tidegate-pipeline",
    help="Jobs over the remote tier of a Kafka cluster.",
    no_args_is_help=False,
    **_STYLE,
)
for _name, _about in COMMANDS.items():
    app.command(_name, short_help=_about)(_not_loaded)


@app.callback()
def _pipeline() -> None:
    """Jobs over the remote tier of a Kafka cluster."""


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code. Every failure is one line on standard error."""
    logging.basicConfig(level=logging.CRITICAL)
    return exit_code(app, "tidegate-pipeline", arguments, lambda error: _say(*_explained(error)))


def _explained(error: Exception) -> tuple[str, int]:
    try:
        if isinstance(error, ImportError):
            raise error
        from pipeline.commands.failures import explain  # imports Spark to recognise its errors
    except ImportError as missing:
        return what_to_install(missing) or f"internal error: {missing}", FAILED
    return explain(error)


def _say(message: str, code: int) -> int:
    """Prints the message as one line, even if a library's error text has several."""
    typer.echo("tidegate-pipeline: " + " ".join(message.split()), err=True)
    return code
