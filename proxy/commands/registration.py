"""`tidegate tier`: registers the commands of this package."""

from __future__ import annotations

import typer

from proxy.commands.accept import accept
from proxy.commands.bounds import bounds
from proxy.commands.failed_deletes import failed_deletes
from proxy.commands.metadata import metadata
from proxy.commands.missing_topics import missing_topics
from proxy.commands.orphans import orphans
from proxy.commands.quarantine import quarantine
from proxy.commands.rebuild import rebuild
from proxy.commands.rewrap import rewrap
from proxy.commands.segments import segments
from proxy.commands.topics import topics
from proxy.commands.usage import usage
from proxy.commands.verify import verify

tier = typer.Typer(
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


for _command in (topics, segments, bounds, usage, verify, orphans, rebuild, accept, rewrap):
    tier.command()(_command)
tier.command("failed-deletes")(failed_deletes)
tier.add_typer(quarantine)
tier.add_typer(missing_topics)
tier.add_typer(metadata)
