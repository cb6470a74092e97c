"""`tidegate tier failed-deletes`: segments whose objects the store did not delete, as the owners published them.

The list is the topic `__delete_failed_remote_log_segments`; the owners go on trying, and a success ends the entry.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.config import TidegateConfig, load_config
from proxy.logging_setup import set_up_logging
from proxy.tier_commands import TIMEOUT_MS, tiered_cluster
from tiers.metadata.failed_deletions_topic import FailedDeletion, read_failed_deletions

_WIDTH = 1_000


def failed_deletes(
    config: Annotated[Path, typer.Option("--config", help="The TOML file; docs/configuration.md names every key.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Lists segments whose objects the store did not delete after several attempts; the owners go on trying."""
    settings = load_config(config)
    set_up_logging("critical", "text")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(_read(settings))
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2))
    else:
        console = Console()
        (console if console.is_terminal else Console(width=_WIDTH)).print(_table(found))


async def _read(config: TidegateConfig) -> list[FailedDeletion]:
    async with tiered_cluster(config) as (client, _):
        return await read_failed_deletions(client, TIMEOUT_MS)


def _table(found: Sequence[FailedDeletion]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("partition", "segment", "from", "to", "bytes", "attempts", "failing since", "last error"):
        table.add_column(heading, overflow="fold")
    for each in found:
        since = datetime.fromtimestamp(each.first_failed_at_ms / 1000, UTC).isoformat(timespec="seconds")
        numbers = (each.start_offset, each.end_offset, each.size_bytes, each.attempts)
        # As text: brackets of an error are no markup.
        row = (f"{each.topic}-{each.partition}", each.segment, *map(str, numbers), since, each.error)
        table.add_row(*map(Text, row))
    return table
