"""The command `tidegate`. What a user gets wrong is answered in one line.

Exit codes: 0 good, 1 failed, 2 misused; under `tidegate tier` 1 is for findings, and 3 for failed.
"""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import PackageNotFoundError, version

import typer
import uvloop

from proxy.app import serve as serve_forever
from proxy.check import check as check_everything
from proxy.commands.registration import tier
from proxy.config import load_config
from proxy.logging_setup import set_up_logging
from proxy.processes import serve_processes
from tiers import console
from tiers.console import ConfigFile, explained

FAILED = 1
"""Of what is no `tidegate tier`."""

app = typer.Typer(
    name="tidegate",
    help="A Kafka-protocol proxy that gives any Kafka cluster a second storage tier.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(tier)


@app.command()
def serve(config: ConfigFile) -> None:
    """Runs the proxy until SIGTERM or SIGINT, then drains its connections."""
    settings = load_config(config)
    set_up_logging(settings.log.level, settings.log.format)
    if not settings.workers:
        serve_forever(settings)
    elif not serve_processes(settings):
        raise typer.Exit(FAILED)


@app.command()
def check(config: ConfigFile) -> None:
    """Reaches every broker and the store, prints the address map and what is wrong."""
    settings = load_config(config)
    set_up_logging("error", "text")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(check_everything(settings))
    for line in report.lines():
        typer.echo(line)
    if report.problems:
        raise typer.Exit(FAILED)


@app.command(name="version")
def show_version() -> None:
    """Prints the version."""
    try:
        typer.echo(version("tidegate"))
    except PackageNotFoundError:
        typer.echo("unknown: the package is not installed")


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code; every failure is a line on standard error."""
    try:
        result = app(arguments, standalone_mode=False, prog_name="tidegate")
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return FAILED
    except Exception as error:
        return _say(*explained(error, console.FAILED if arguments[:1] == ["tier"] else FAILED))
    return result if isinstance(result, int) else 0


def _say(message: str, code: int) -> int:
    for line in message.splitlines() or [""]:
        typer.echo(f"tidegate: {line}", err=True)
    return code
