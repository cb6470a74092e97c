"""Every command of the package, under its name."""

from __future__ import annotations

import typer

from proxy.commands.metadata import metadata
from proxy.commands.orphans import orphans
from proxy.commands.rebuild import rebuild
from proxy.commands.rewrap import rewrap
from proxy.commands.segments import segments
from proxy.commands.topics import topics
from proxy.commands.usage import usage
from proxy.commands.verify import verify


def add_commands(tier: typer.Typer) -> None:
    for command in (topics, segments, usage, verify, orphans, rebuild, rewrap):
        tier.command()(command)
    tier.add_typer(metadata)
