"""The command `tidegate`. It answers a user's mistake with one line on standard error.

docs/day-to-day.md has its exit codes.
"""

from __future__ import annotations

import logging
import sys
from contextlib import closing
from typing import Annotated

import typer

from proxy.commands.check import checked
from proxy.commands.explain import explain
from proxy.commands.init import init
from proxy.commands.tier.accept import accept
from proxy.commands.tier.bounds import bounds
from proxy.commands.tier.cut import cut
from proxy.commands.tier.delete_missing import delete_missing
from proxy.commands.tier.failed_deletes import failed_deletes
from proxy.commands.tier.metadata import metadata
from proxy.commands.tier.orphans import orphans
from proxy.commands.tier.pause import pause, resume
from proxy.commands.tier.rebuild import rebuild
from proxy.commands.tier.rewrap import rewrap
from proxy.commands.tier.segments import segments
from proxy.commands.tier.topics import topics
from proxy.commands.tier.verify import verify
from proxy.commands.top import top
from proxy.config import load_config
from proxy.logging_setup import set_up_logging
from proxy.process.child import run_child
from proxy.process.fork_server import ForkServer
from proxy.process.live_settings import hold_reloads
from proxy.process.processes import serve_processes
from proxy.process.start.settings_in_use import settings_in_use
from proxy.process.start.settings_mistakes import settings_mistakes
from proxy.process.start.unhandled_errors import unhandled_errors_logged
from proxy.version import installed_version
from tiers.commands.console import FAILED, ConfigFile, explained
from tiers.commands.program import Program, exit_code
from tiers.config.tier_config import ConfigError
from tiers.config.topic_policy import NOTHING_TIERED

logger = logging.getLogger(__name__)

tier = Program(
    name="tier",
    help="Shows, checks and repairs the remote tier.",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
)


@tier.callback(invoke_without_command=True)
def _tier(context: typer.Context) -> None:
    """Shows, checks and repairs the remote tier."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# The help of `tidegate tier` has one line per command, and would cut the description of this one.
tier.command(short_help="Lists the topics that the settings name or that have segments.")(topics)
for _command in (segments, bounds, verify, orphans, rebuild, accept, cut, rewrap, pause, resume):
    tier.command()(_command)
tier.command("failed-deletes")(failed_deletes)
tier.command("delete-missing")(delete_missing)
tier.add_typer(metadata)


app = Program(
    name="tidegate",
    help="A Kafka-protocol proxy that gives any Kafka cluster a second storage tier.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(tier)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        show_version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _tidegate(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version of Tidegate.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """A Kafka-protocol proxy that gives any Kafka cluster a second storage tier."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def serve(config: ConfigFile) -> None:
    """Runs the proxy.

    SIGTERM or SIGINT ends it: the proxy stops accepting clients, answers the requests in progress, and exits. SIGHUP
    reads the settings again: the log level, [limits], [[topics]] and the quotas apply at once, and the log names what
    needs a restart."""
    hold_reloads()
    settings = load_config(config)
    if mistakes := list(settings_mistakes(settings)):
        raise ConfigError("\n".join(mistakes))
    set_up_logging(settings.log.level, settings.log.format)
    logger.info("starting: %s", config)
    with closing(ForkServer(run_child)) as forks, unhandled_errors_logged(), settings_in_use(config):
        if not settings.is_tiered:
            logger.info("tiered: %s", NOTHING_TIERED)
        if not serve_processes(settings, config, forks):
            raise forks.loss or typer.Exit(FAILED)


@app.command()
def check(config: ConfigFile) -> None:
    """Contacts every broker and the store, and reports all problems.

    Also prints the address at which clients reach each broker through the proxy, and which topics are tiered by which
    rule. Binds the ports that `tidegate serve` will bind, unless a proxy serves by this file now. Writes a small object
    to the store and deletes it again. The last line counts the problems and the warnings. Exit code 1: there is a
    problem. Exit code 2: a problem lies in the settings or in a file that they name."""
    raise typer.Exit(checked(load_config(config), config))


app.command()(init)
app.command()(explain)
app.command()(top)


@app.command(name="version")
def show_version() -> None:
    """Prints the version of Tidegate."""
    typer.echo(installed_version())


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code. Prints a failure on standard error."""
    return exit_code(app, "tidegate", arguments, lambda error: _say(*explained(error)))


def _say(message: str, code: int) -> int:
    for line in message.splitlines() or [""]:
        typer.echo(f"tidegate: {line}", err=True)
    return code
