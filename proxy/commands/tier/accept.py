"""`tidegate tier accept`: records that an operator accepts what is left of a partition.

The owner doubts the past when records are in neither tier and may have been copied (docs/design.md, safety rule 5). The
command deletes nothing and changes no segment. It records that the operator accepts the records that the metadata, the
store and the brokers have as all that is left. The partition's owner, a running `tidegate serve`, reads back the
whole segments that only the store knows, finishes those that fit, and records a gap for the rest.

The acceptance names the partition manifest that the store has now. It is valid only while the owner finds the same one.
If the metadata lost records since that manifest was written, it may have lost the topic's total retention or a pause as
well. So the command also records the longest total retention that the manifest or the metadata has, and pauses what the
manifest says is paused.

The command is idempotent: if the metadata, the store and the leader agree, there is nothing to accept. Then the command
says so, writes nothing, and ends with exit code 0.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from proxy.commands.tier.bounds import PartitionBounds, partition_bounds, show_bounds
from proxy.commands.tier.tools import parse_target, run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import (
    TIMEOUT_MS,
    RemoteTierError,
    UnknownTargetError,
    metadata_to_now,
    open_storage,
    storage_cluster_id,
    tiered_cluster,
)
from tiers.commands.console import TERMINAL, AsJson, ConfigFile, say, show_json
from tiers.config.paused_work import NOTHING_PAUSED, TierWork, paused_work
from tiers.config.total_retention import TotalRetention, longest_total, recorded_total
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.log_bounds import recorded_log_start
from tiers.metadata.partition_manifest import witness_of
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogSource
from tiers.tasks.history.stop_check import may_be_in_doubt, reaches_positions
from tiers.tasks.history.stored_manifest import read_manifest, readable_manifest


class Acceptance(NamedTuple):
    """The partition's bounds, the `witness_of` the manifest that the operator accepts, and what the acceptance changes.

    If `is_needed` is false, there is nothing to accept, and nothing was written. `total` is the total retention that
    the acceptance records, because the metadata may have lost the recorded one; None: it records none. `paused` is the
    work that the acceptance pauses for the same reason."""

    bounds: PartitionBounds
    manifest: str
    is_needed: bool
    total: TotalRetention | None = None
    paused: frozenset[TierWork] = NOTHING_PAUSED


def accept(
    config: ConfigFile,
    partition: Annotated[str, typer.Argument(metavar="TOPIC:PARTITION")],
    yes: Annotated[bool, typer.Option("--yes", "--apply", help="Write. Without it, nothing is written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Accepts what is left of a partition that lost metadata.

    The partition has the alarm metadata-lost.

    The owner reads back the whole segments that only the store knows, finishes those that fit, and records a gap for
    the rest. First try to restore the metadata by `tidegate tier rebuild`."""
    topic, number = parse_target(partition)
    if topic is None or number is None:
        raise typer.BadParameter(f"expected TOPIC:PARTITION, not {partition!r}")
    settings = load_config(config)
    found, manifest, is_needed, total, paused = run_command(lambda: accept_partition(settings, topic, number, yes))
    if as_json:
        kept = None if total is None else total.config()
        changes = {"manifest": manifest, "total": kept, "paused": sorted(paused)}
        show_json(found.as_json() | changes | {"needed": is_needed, "written": yes and is_needed})
    else:
        show_bounds([found])
        if is_needed:
            reason = found.trouble or "the metadata, the store and the leader do not agree"
            in_store = "none" if manifest == witness_of(None) else "in the store"
            typer.echo(f"{topic}-{number}: {reason} (manifest: {in_store})")
        if found.unknown:
            typer.echo(
                f"{topic}-{number}: with an acceptance, the owner reads back the segments of these offsets that the"
                " store has, and records a gap for the rest"
            )
        if total is not None:
            typer.echo(
                f"{topic}: the metadata may have lost the total retention of the topic. An acceptance records the"
                f" longest that is known, {total}, so that it expires no record. Correct it afterwards by"
                " `kafka-configs` through the proxy"
            )
        if paused:
            typer.echo(
                f"{topic}: the metadata may have lost that an operator paused {', '.join(sorted(paused))}. An"
                " acceptance pauses that again. End the pause afterwards by `tidegate tier resume`"
            )
    if not is_needed:
        say(f"{topic}-{number}: nothing to accept: the metadata, the store and the leader agree. Nothing was written.")
    elif yes:
        say("The acceptance was written. The owner continues with this partition in its next round.")
    else:
        say("Nothing was written. Use --yes to write.")


async def accept_partition(config: TidegateConfig, topic: str, number: int, write: bool) -> Acceptance:
    """Records the acceptance when `write` is true and there is something to accept.

    Raises `RemoteTierError` with a message of one line."""
    async with tiered_cluster(config) as (client, cluster):
        known = cluster.topics.get(topic)
        if known is None or number not in known.partitions:
            raise UnknownTargetError(f"the cluster has no partition {topic}:{number}")
        partition = TopicIdPartition(known.topic_id, number, topic)
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
            async with (
                open_storage(config, cluster.cluster_id) as storage,
                metadata_to_now(config, client, Path(folder), progress=TERMINAL) as metadata,
            ):
                source = BrokerLogSource(client)
                found = await partition_bounds(source, cluster, metadata, partition)
                cluster_id = storage_cluster_id(config, cluster.cluster_id)
                manifest = await read_manifest(storage, cluster_id, partition)
                # While the leader does not answer, the operator alone can judge.
                is_needed = bool(found.trouble) or await _is_needed(source, metadata, partition, manifest, cluster_id)
                if not (is_needed or metadata.is_known(partition)):
                    raise RemoteTierError(f"{topic} is not tiered: the metadata has no record of {topic}:{number}")
                total, paused = await _kept_settings(metadata, partition, manifest)
                if write and is_needed:
                    kept = {work.key: "true" for work in paused} | ({} if total is None else total.config())
                    if kept:  # first: the owner may expire records as soon as it sees the acceptance
                        await metadata.change_topic_tier_config(partition.topic_id, topic, kept)
                    await metadata.accept(partition, witness_of(manifest))
                return Acceptance(found, witness_of(manifest), is_needed, total, paused)


async def _kept_settings(
    metadata: RemoteLogMetadataManager, partition: TopicIdPartition, stored_manifest: bytes | None
) -> tuple[TotalRetention | None, frozenset[TierWork]]:
    """Returns the total retention and the pauses that an acceptance must record, so that no record expires by it.

    An acceptance is about the known records. It is no word for a shorter total or for the end of a pause. If the
    metadata lost records since the manifest was written, the settings that it has may be earlier ones, or none. The
    total is None if the recorded one stays."""
    manifest = readable_manifest(stored_manifest)
    if manifest is None or await reaches_positions(metadata, manifest, TIMEOUT_MS):
        return None, NOTHING_PAUSED
    present = metadata.topic_tier_config(partition.topic_id)
    known = recorded_total(present)
    kept = longest_total([recorded_total(manifest.tier_config), known])
    return None if kept == known else kept, paused_work(manifest.tier_config) - paused_work(present)


async def _is_needed(
    source: LogSource,
    metadata: RemoteLogMetadataManager,
    partition: TopicIdPartition,
    manifest: bytes | None,
    cluster_id: str,
) -> bool:
    """Returns whether there is anything to accept. Raises `BrokerError`."""
    bounds = await source.bounds(partition, TIMEOUT_MS)
    log_start = recorded_log_start(metadata, partition, bounds.log_start_offset)
    return await may_be_in_doubt(metadata, partition, bounds, log_start, manifest, cluster_id, TIMEOUT_MS)
