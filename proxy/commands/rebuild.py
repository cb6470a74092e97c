"""`tidegate tier rebuild`: the metadata topic again, from nothing but the store.

It shows the plan; with --yes it writes it, into a metadata topic that nothing was ever written to.
"""

from __future__ import annotations

from typing import Annotated

import typer

from proxy.commands.tools import Concurrency, run_command
from proxy.config import load_config
from tiers.console import AsJson, ConfigFile
from tiers.open_tier import open_key_ring, open_storage
from tiers.rebuilding import Rebuild, RebuildOptions, plan_rebuild, show_rebuild
from tiers.rebuilding import rebuild as rebuild_metadata


def rebuild(
    config: ConfigFile,
    into: Annotated[
        str | None, typer.Option("--into", help="The metadata topic to write; else the configured.")
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Whose objects; else those of this cluster.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "--apply", help="Without it nothing is written.")] = False,
    skip_undecided: Annotated[bool, typer.Option("--skip-undecided", help="Writes what can be decided.")] = False,
    with_unknown_topics: Annotated[
        bool, typer.Option("--with-unknown-topics", help="Also topics that are not in the cluster, to be deleted.")
    ] = False,
    concurrency: Concurrency = 16,
    as_json: AsJson = False,
) -> None:
    """Restores the metadata topic from the store alone; shows the plan, and writes it with --yes."""
    settings = load_config(config)
    options = RebuildOptions(into, cluster, yes, skip_undecided, with_unknown_topics)

    async def plan(cluster_id: str) -> Rebuild:
        async with open_storage(settings, cluster_id) as storage:
            return await plan_rebuild(storage, cluster_id, open_key_ring(settings), concurrency)

    done = run_command(lambda: rebuild_metadata(settings, options, plan))
    show_rebuild(done, options, "--yes", as_json)
