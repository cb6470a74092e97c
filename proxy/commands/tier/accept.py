"""`tidegate tier accept`: restores what the store knows of a partition, and accepts the rest as lost.

The owner doubts the past when the metadata has lost records, or when records are in neither tier and may have been
copied (docs/design.md, safety rule 5). The command deletes nothing and changes no segment. It records what the stored
facts have and the metadata lacks, and announces the whole segments that only the store knows. The partition's owner, a
running `tidegate serve`, reads these back, finishes those that fit, and records a gap for the rest.

If the metadata lost records, it may have lost the topic's total retention or a pause as well. So the command also
records the longest total retention that the facts or the metadata have, and pauses what the facts say is paused.

The command is idempotent: if the metadata, the store and the leader agree, there is nothing to accept. Then the command
says so, writes nothing, and ends with exit code 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple
from uuid import UUID

import typer

from proxy.commands.tier.bounds import PartitionBounds, partition_bounds, show_bounds
from proxy.commands.tier.tools import parse_partition, run_command
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
from tiers.config.topic_policy import paused_work
from tiers.config.total_retention import recorded_total
from tiers.errors import LaterFormatError, RemoteLogMetadataError
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.metadata_log import MetadataLog
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds, LogSource
from tiers.storage.locations import HOME
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.history.acceptance import accept_what_is_left, kept_settings, may_be_in_doubt
from tiers.tasks.history.stored_facts import StoredFacts, read_stored_facts
from tiers.tasks.history.tier_place import NO_COPY, find_copied, location_of, missing_marker, write_marker


class Acceptance(NamedTuple):
    """The partition's bounds, and what the acceptance changes.

    If `is_needed` is false, there is nothing to accept, and nothing was written. `settings` are those that the metadata
    may have lost. `not_restored` are segments that the command could not announce."""

    bounds: PartitionBounds
    is_needed: bool
    settings: Mapping[str, str] = {}
    not_restored: tuple[str, ...] = ()


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
    topic, number = parse_partition(partition)
    settings = load_config(config)
    found, is_needed, lost, not_restored = run_command(lambda: accept_partition(settings, topic, number, yes))
    total, paused = recorded_total(lost), paused_work(lost)
    if as_json:
        changes = {"total": total.config() or None, "paused": sorted(paused), "not_restored": list(not_restored)}
        show_json(found.as_json() | changes | {"needed": is_needed, "written": yes and is_needed})
    else:
        show_bounds([found])
        if is_needed:
            reason = found.trouble or "the metadata, the store and the leader do not agree"
            typer.echo(f"{topic}-{number}: {reason}")
        if found.unknown:
            typer.echo(
                f"{topic}-{number}: with an acceptance, the owner reads back the segments of these offsets that the"
                " store has, and records a gap for the rest"
            )
        if total.is_set:
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
    for each in not_restored:
        say(f"{topic}-{number}: an acceptance cannot restore {each}. The doubt stays: use `tidegate tier rebuild`.")
    if not is_needed:
        say(f"{topic}-{number}: nothing to accept: the metadata, the store and the leader agree. Nothing was written.")
    elif yes:
        say("The acceptance was written. The owner looks again within an hour, and goes on with this partition.")
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
        async with (
            open_storage(config, cluster.cluster_id) as storage,
            metadata_to_now(config, client, progress=TERMINAL) as log,
        ):
            metadata, cluster_id = RemoteLogMetadataManager(log), storage_cluster_id(config, cluster.cluster_id)
            lost_markers = await _lost_markers(storage, metadata.state, cluster_id, partition)
            is_readable = True
            try:
                stored = await read_stored_facts(storage, cluster_id, partition)
            except (LaterFormatError, RemoteLogMetadataError):
                stored = await read_stored_facts(storage, cluster_id, partition, is_strict=False)
                is_readable = False
            await log.ensure_fresh(partition, 0, TIMEOUT_MS)
            source = BrokerLogSource(client)
            found = await partition_bounds(source, cluster, metadata.state, partition)
            # While the leader does not answer, the operator alone can judge.
            is_needed = bool(lost_markers) or bool(found.trouble) or not is_readable
            is_needed = is_needed or await _is_needed(source, log, stored)
            if not (is_needed or metadata.state.is_known(partition)):
                raise RemoteTierError(f"{topic} is not tiered: the metadata has no record of {topic}:{number}")
            settings = await kept_settings(log, stored, TIMEOUT_MS)
            not_restored: list[str] = []
            if write and is_needed:
                for location, marker_id in lost_markers.items():
                    await _require_copied(storage, metadata.state, location)
                    await write_marker(storage, cluster_id, location, marker_id)
                bounds, log_start = await _log_of(source, metadata.state, partition)
                not_restored = await accept_what_is_left(
                    storage, metadata, cluster_id, partition, bounds, log_start, TIMEOUT_MS
                )
            return Acceptance(found, is_needed, settings, tuple(not_restored))


async def _lost_markers(
    storage: RemoteStorageManager, metadata: RemoteLogMetadataState, cluster_id: str, partition: TopicIdPartition
) -> dict[str, UUID]:
    """Returns the ids of the markers that home and the locations of the partition's segments lack."""
    names = {HOME, *(location_of(each.metadata) for each in metadata.stored_segments(partition))}
    lost = {name: await missing_marker(storage, metadata, cluster_id, name) for name in sorted(names)}
    return {name: marker_id for name, marker_id in lost.items() if marker_id is not None}


async def _require_copied(storage: RemoteStorageManager, metadata: RemoteLogMetadataState, location: str) -> None:
    is_found, asked = await find_copied(storage, metadata, location)
    while not is_found and asked:
        is_found, asked = await find_copied(storage, metadata, location, asked)
    if not is_found:
        raise RemoteTierError(NO_COPY)


async def _log_of(
    source: LogSource, metadata: RemoteLogMetadataState, partition: TopicIdPartition
) -> tuple[LocalLogBounds, int]:
    """Returns the leader's bounds, and the recorded log start. Raises `BrokerError`."""
    bounds = await source.bounds(partition, TIMEOUT_MS)
    return bounds, RemoteLog(metadata, partition).log_start(bounds.log_start_offset)


async def _is_needed(source: LogSource, log: MetadataLog, stored: StoredFacts) -> bool:
    """Returns whether there is anything to accept. Raises the errors of the brokers and of the store."""
    bounds, log_start = await _log_of(source, log.state, stored.partition)
    return await may_be_in_doubt(log, bounds, log_start, stored, TIMEOUT_MS)
