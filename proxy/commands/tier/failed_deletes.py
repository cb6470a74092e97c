"""`tidegate tier failed-deletes`: lists segments whose objects the store did not delete.

The owners publish the list in the topic `__delete_failed_remote_log_segments`. They keep trying, and remove a segment
from the list when its deletion succeeds.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.commands.tier.tools import run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import TIMEOUT_MS, tiered_cluster
from tiers.commands.console import AsJson, ConfigFile, show_json, show_table, time_text
from tiers.tasks.deletion.failed_deletions import FailedDeletion, read_failed_deletions


def failed_deletes(config: ConfigFile, as_json: AsJson = False) -> None:
    """Lists segments whose objects the store did not delete.

    The owner of a segment adds it to the list after several failed attempts. It keeps trying, and removes the segment
    from the list when the deletion succeeds."""
    settings = load_config(config)
    found = run_command(lambda: _read(settings))
    if as_json:
        show_json(found)
    else:
        _show(found)


async def _read(config: TidegateConfig) -> list[FailedDeletion]:
    async with tiered_cluster(config, reads_metadata=False) as (client, _):
        return await read_failed_deletions(client, TIMEOUT_MS)


def _show(found: Sequence[FailedDeletion]) -> None:
    headings = ["partition", "segment", "from", "to", "bytes", "attempts", "failing since", "last error"]
    rows = [
        (
            f"{each.topic}-{each.partition}",
            each.segment,
            each.start_offset,
            each.end_offset,
            each.size_bytes,
            each.attempts,
            time_text(each.first_failed_at_ms),
            each.error,
        )
        for each in found
    ]
    show_table(headings, rows, numbers=["from", "to", "bytes", "attempts"])
