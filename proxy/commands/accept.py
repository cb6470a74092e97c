"""`tidegate tier accept`: records that an operator accepts a partition that stopped because a witness is missing.

The owner stops a partition when records are in neither tier and the owner cannot tell whether they were ever copied
(DESIGN, safety rule 5). The command deletes nothing and changes no segment. It records that the operator accepts the
records that the metadata and the brokers have as all that is left. The partition's owner, a running `tidegate serve`,
records a gap in its next round and copies on behind the gap.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from proxy.commands.bounds import PartitionBounds, partition_bounds, show_bounds
from proxy.commands.tools import parse_target, run_command
from proxy.config import TidegateConfig, load_config
from tiers.console import AsJson, ConfigFile, progress_count, say, show_json
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition
from tiers.open_tier import RemoteTierError, metadata_to_now, tiered_cluster


def accept(
    config: ConfigFile,
    partition: Annotated[str, typer.Argument(metavar="TOPIC:PARTITION")],
    yes: Annotated[bool, typer.Option("--yes", "--apply", help="Without it nothing is written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lets a partition go on that stopped since its metadata may have been lost: what is known is all there is.

    Try `tidegate tier rebuild` first: what this command accepts as lost is not looked for again."""
    topic, number = parse_target(partition)
    if topic is None or number is None:
        raise typer.BadParameter(f"expected TOPIC:PARTITION, not {partition!r}")
    settings = load_config(config)
    found = run_command(lambda: accept_partition(settings, topic, number, yes))
    if as_json:
        show_json(asdict(found) | {"gaps": [gap._asdict() for gap in found.gaps], "written": yes})
    else:
        show_bounds([found])
    if yes:
        say("Written down: the owner goes on with this partition in its next round.")
    else:
        say("Nothing was written. With --yes the owner goes on with what is known.")


async def accept_partition(config: TidegateConfig, topic: str, number: int, write: bool) -> PartitionBounds:
    """Returns the partition's present bounds. When `write` is true, records the acceptance.

    Raises `RemoteTierError` with a message of one line."""
    async with tiered_cluster(config) as (client, cluster):
        known = cluster.topics.get(topic)
        if known is None or number not in known.partitions:
            raise RemoteTierError(f"the cluster has no partition {topic}:{number}")
        partition = TopicIdPartition(known.topic_id, number, topic)
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
            async with metadata_to_now(config, client, Path(folder), watch=progress_count) as metadata:
                found = await partition_bounds(BrokerLogSource(client), cluster, metadata, partition)
                if write:
                    await metadata.accept(partition)
                return found
