"""`tidegate tier rebuild`: restores the metadata topic from the store alone.

The command shows the plan. With `--yes` it also writes the metadata, into a metadata topic that has never had a record.
"""

from __future__ import annotations

from typing import Annotated

import typer

from proxy.commands.tier.tools import Concurrency, run_command
from proxy.config import load_config
from tiers.access.open_tier import open_key_ring, open_storage
from tiers.commands.console import TERMINAL, AsJson, ConfigFile
from tiers.commands.rebuild_report import show_rebuild
from tiers.upkeep.rebuild import Rebuild, RebuildOptions, plan_rebuild
from tiers.upkeep.rebuild import rebuild as rebuild_metadata
from tiers.upkeep.runner import HereRunner, OpenedStore


def rebuild(
    config: ConfigFile,
    into: Annotated[
        str | None, typer.Option("--into", help="The metadata topic to write. Default: the configured topic.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="The cluster id of the objects. Default: this cluster.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "--apply", help="Write. Without it, nothing is written.")] = False,
    skip_undecided: Annotated[
        bool, typer.Option("--skip-undecided", help="Write the other partitions, if some cannot be decided.")
    ] = False,
    with_unknown_topics: Annotated[
        bool,
        typer.Option(
            "--with-unknown-topics",
            help="Also write topics that the cluster lacks. Owners delete them after `tidegate tier delete-missing`.",
        ),
    ] = False,
    concurrency: Concurrency = 16,
    as_json: AsJson = False,
) -> None:
    """Restores the metadata topic from the store alone.

    Shows the plan. With --yes, also writes the metadata."""
    settings = load_config(config)
    options = RebuildOptions(into, cluster, yes, skip_undecided, with_unknown_topics)

    async def plan(cluster_id: str) -> Rebuild:
        async with open_storage(settings, cluster_id) as storage:
            store = OpenedStore(storage, cluster_id, open_key_ring(settings))
            return await plan_rebuild(store, HereRunner(TERMINAL), concurrency)

    done = run_command(lambda: rebuild_metadata(settings, options, plan, TERMINAL))
    show_rebuild(done, options, "--yes", as_json)
