"""`tidegate tier bounds`: prints the bounds of both tiers. It reads them from the cluster, and changes nothing.

The bounds (docs/founding.md, "Bounds") are Lz >= Ly >= Lx and Ly > Ry >= Rx. Ry is an inclusive end, the others are
next offsets and starts. Lz is the high watermark, since a broker tells its log end only to replicas. A gap is a run of
offsets that the brokers removed before they were copied. Both sides of a gap stay readable
(docs/design.md, safety rule 5). Other offsets that neither tier has are unknown: their records, or the metadata of
their copies, were lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from proxy.commands.tier.tools import check_topic, run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import TIMEOUT_MS, UnknownTargetError, metadata_to_now, tiered_cluster
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.commands.console import FINDINGS, TERMINAL, AsJson, ConfigFile, show_json, show_table
from tiers.errors import RemoteLogError
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap
from tiers.tasks.partition_watch import violated_bounds

_PARTITIONS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """One line of the answer. An unknown bound is None. If the leader gave no answer, `trouble` is the reason."""

    topic: str
    partition: int
    log_start_offset: int | None = None
    remote_start: int | None = None
    remote_end: int | None = None
    next_local_offset: int | None = None
    """The answer to NEXT_LOCAL_TIMESTAMP and EARLIEST_PENDING_UPLOAD."""
    local_log_start: int | None = None
    last_stable_offset: int | None = None
    high_watermark: int | None = None
    gaps: tuple[LogGap, ...] = ()
    unknown: tuple[LogGap, ...] = ()
    """The runs of offsets that neither tier has, besides the gaps."""
    violated: tuple[str, ...] = ()
    trouble: str | None = None

    @property
    def holds(self) -> bool:
        return not self.violated and self.trouble is None

    def as_json(self) -> dict[str, object]:
        runs = {"gaps": self.gaps, "unknown": self.unknown}
        return asdict(self) | {name: [run._asdict() for run in found] for name, found in runs.items()}


_COLUMNS = (
    ("log start", "log_start_offset"),
    ("Rx first remote", "remote_start"),
    ("Ry last remote", "remote_end"),
    ("next local", "next_local_offset"),
    ("Lx first local", "local_log_start"),
    ("Ly LSO", "last_stable_offset"),
    ("Lz HW", "high_watermark"),
)


def bounds(
    config: ConfigFile,
    topic: Annotated[str | None, typer.Argument(help="Default: all tiered topics.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prints the bounds of both tiers, and offsets in neither.

    The lines name the gaps of the log, and the other offsets that neither tier has.

    Lx is the local log start, Ly the last stable offset, and Lz the high watermark. Rx and Ry are the first and the
    last remote offset. Next local is the first offset that is not remote yet. Ly > Ry >= Rx and Lz >= Ly >= Lx must
    hold. The last column says so, or names the rules that are violated.

    Exit code 1: the bounds of a partition do not hold or are unknown."""
    settings = load_config(config)
    check_topic(topic)
    found = run_command(lambda: read_bounds(settings, topic))
    if as_json:
        show_json([each.as_json() | {"holds": each.holds} for each in found])
    else:
        show_bounds(found)
    if not all(each.holds for each in found):
        raise typer.Exit(FINDINGS)


def show_bounds(found: list[PartitionBounds]) -> None:
    headings = [heading for heading, _ in _COLUMNS]
    rows = [
        (
            f"{each.topic}-{each.partition}",
            *(getattr(each, field) for _, field in _COLUMNS),
            each.trouble or ("hold" if each.holds else f"violated: {', '.join(each.violated)}"),
        )
        for each in found
    ]
    show_table(["partition", *headings, "bounds"], rows, numbers=headings)
    for each in found:
        name = f"{each.topic}-{each.partition}"
        for first, following in each.gaps:
            typer.echo(
                f"{name}: gap: the brokers removed the offsets {first} to {following - 1} before they were copied"
            )
        for first, following in each.unknown:
            typer.echo(f"{name}: neither tier has the offsets {first} to {following - 1}")


async def read_bounds(config: TidegateConfig, topic: str | None) -> list[PartitionBounds]:
    """Returns the bounds of every partition with remote metadata, or of all partitions of one topic.

    Raises `RemoteTierError` with a message of one line."""
    async with tiered_cluster(config) as (client, cluster):
        if topic is not None and topic not in cluster.topics:
            raise UnknownTargetError(f"the cluster has no topic {topic}")
        return await _read(config, client, cluster, topic)


async def _read(
    config: TidegateConfig, client: BrokerClient, cluster: ClusterMetadata, topic: str | None
) -> list[PartitionBounds]:
    async with metadata_to_now(config, client, progress=TERMINAL) as log:
        partitions = _asked_for(cluster, log.state, topic)
        source, slots = BrokerLogSource(client), asyncio.Semaphore(_PARTITIONS_AT_ONCE)

        async def of(partition: TopicIdPartition) -> PartitionBounds:
            async with slots:
                return await partition_bounds(source, cluster, log.state, partition)

        async with asyncio.TaskGroup() as tasks:
            looking = [tasks.create_task(of(partition)) for partition in partitions]
        return [look.result() for look in looking]


def _asked_for(cluster: ClusterMetadata, metadata: RemoteLogMetadataState, topic: str | None) -> list[TopicIdPartition]:
    if topic is None:
        partitions = metadata.partitions()
    else:
        known = cluster.topics[topic]
        partitions = [TopicIdPartition(known.topic_id, number, topic) for number in known.partitions]
    return sorted(partitions, key=lambda each: (each.topic, each.topic_id, each.partition))


async def partition_bounds(
    source: BrokerLogSource, cluster: ClusterMetadata, metadata: RemoteLogMetadataState, partition: TopicIdPartition
) -> PartitionBounds:
    """Returns the bounds of one partition. If the leader does not answer, `trouble` has the error."""
    known = PartitionBounds(
        partition.topic,
        partition.partition,
        metadata.log_start_offset(partition),
        metadata.earliest_offset(partition),
        metadata.remote_end_offset(partition),
        gaps=tuple(metadata.gaps(partition)),
    )
    if partition.topic_id not in cluster.topics_by_id:
        return replace(known, trouble="the topic was deleted")
    try:
        local = await source.bounds(partition, TIMEOUT_MS)
    except RemoteLogError as error:
        return replace(known, trouble=str(error))
    remote = RemoteLog(metadata, partition)
    log_start = local.log_start_offset if known.log_start_offset is None else known.log_start_offset
    return replace(
        known,
        log_start_offset=log_start,
        next_local_offset=remote.next_local(local),
        local_log_start=local.log_start_offset,
        last_stable_offset=local.last_stable_offset,
        high_watermark=local.high_watermark,
        unknown=tuple(await remote.unknown_offsets(remote.log_start(), local.log_start_offset)),
        violated=tuple(violated_bounds(local, known.remote_start, known.remote_end)),
    )
