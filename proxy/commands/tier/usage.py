"""`tidegate tier usage`: adds up the bytes of each partition in the store, with indexes, manifest and encryption.

The command counts the segments that the metadata knows. With `--by-listing` it counts all objects that the store lists,
whether the metadata knows them or not (`tiers.upkeep.usage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from proxy.commands.tier.tools import Concurrency, OptionalTarget, parse_target, partitions_of, run_command
from proxy.config import load_config
from tiers.access.open_tier import open_tier
from tiers.commands.console import FINDINGS, TERMINAL, AsJson, ConfigFile, show_json, show_table, size_cell
from tiers.upkeep.usage import PartitionUsage, known_usage, listed_usage, topic_usage


def usage(
    config: ConfigFile,
    target: OptionalTarget = None,
    by_listing: Annotated[
        bool, typer.Option("--by-listing", help="Counts all listed objects, whether the metadata knows them or not.")
    ] = False,
    concurrency: Concurrency = 16,
    as_json: AsJson = False,
) -> None:
    """Adds up the bytes in the store, per partition and topic.

    Exit code 1: the indexes of a segment cannot be read, so only its log is counted."""
    settings = load_config(config)
    parse_target(target)

    async def work() -> list[PartitionUsage]:
        async with open_tier(settings, TERMINAL) as tier:
            if by_listing:
                return await listed_usage(tier, None if target is None else set(partitions_of(tier, target)))
            return await known_usage(tier, partitions_of(tier, target), concurrency)

    found = run_command(work)
    source = "listing" if by_listing else "metadata"
    topics = topic_usage(found)
    if as_json:
        show_json({"counted_by": source, "partitions": found, "topics": topics})
    else:
        _print(found, topics)
        typer.echo(f"counted by {source}")
    if any(each.unreadable for each in found):
        raise typer.Exit(FINDINGS)


def _print(found: Sequence[PartitionUsage], topics: Sequence[PartitionUsage]) -> None:
    rows = [_row(f"{each.topic}-{each.partition}", each) for each in found]
    rows += [_row(f"{each.topic} (all)", each) for each in topics]
    headings = ("partition", "segments", "log", "of it encryption", "indexes", "manifest", "total")
    show_table(headings, rows, headings[1:])
    unreadable = [(f"{each.topic}-{each.partition}", said) for each in found for said in each.unreadable]
    if unreadable:
        show_table(("partition", "only the log is counted, because the segment's indexes are unreadable"), unreadable)


def _row(name: str, each: PartitionUsage) -> tuple[object, ...]:
    return (
        name,
        each.segments,
        size_cell(each.log_bytes),
        size_cell(each.overhead_bytes),
        size_cell(each.index_bytes),
        size_cell(each.manifest_bytes),
        size_cell(each.total_bytes),
    )
