"""`tidegate tier bounds`: what an operator asks about the two tiers. All is read from the cluster, nothing is changed.

Bounds are the founding documents': Lz >= Ly >= Lx and Ly > Ry >= Rx. Ry is an inclusive end, the others are next
offsets and starts; Lz is the high watermark, for a broker tells nobody else how far its log goes.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from proxy.app import broker_client
from proxy.config import TidegateConfig, load_config
from proxy.logging_setup import set_up_logging
from proxy.remote_log import RemoteTierError
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.errors import BrokerError, RemoteLogError
from tiers.log.broker_log import BrokerLogSource
from tiers.manager.bounds import violated_bounds
from tiers.metadata.metadata_topic import MetadataTopicSettings
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.metadata.topic_based import TopicBasedRemoteLogMetadataManager, TopicBasedSettings
from tiers.model.ids import TopicIdPartition

TIMEOUT_MS = 15_000
FAILED = 1
_PARTITIONS_AT_ONCE = 16
_WIDTH = 1_000
"""Of a table that goes into a file or a pipe: no number is ever cut short."""

tier = typer.Typer(
    name="tier", help="Looks at the two tiers.", no_args_is_help=False, add_completion=False, rich_markup_mode=None
)


@tier.callback()
def _tier() -> None:
    """Looks at the two tiers."""


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """One line of the answer. What nobody could tell is None; then `trouble` says why."""

    topic: str
    partition: int
    log_start_offset: int | None = None
    remote_start: int | None = None
    remote_end: int | None = None
    pending_upload: int | None = None
    local_log_start: int | None = None
    last_stable_offset: int | None = None
    high_watermark: int | None = None
    violated: tuple[str, ...] = ()
    trouble: str | None = None

    @property
    def holds(self) -> bool:
        return not self.violated and self.trouble is None


_COLUMNS = (
    ("log start", "log_start_offset"),
    ("Rx remote start", "remote_start"),
    ("Ry remote end", "remote_end"),
    ("pending upload", "pending_upload"),
    ("Lx local start", "local_log_start"),
    ("Ly LSO", "last_stable_offset"),
    ("Lz HW", "high_watermark"),
)


@tier.command()
def bounds(
    config: Annotated[Path, typer.Option("--config", help="The TOML file; docs/configuration.md names every key.")],
    topic: Annotated[str | None, typer.Argument(help="All tiered topics without it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Prints where each tier begins and ends; exit code 1 when the bounds between them do not hold."""
    settings = load_config(config)
    set_up_logging("critical", "text")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(read_bounds(settings, topic))
    if as_json:
        typer.echo(json.dumps([asdict(each) | {"holds": each.holds} for each in found], indent=2))
    else:
        console = Console()
        (console if console.is_terminal else Console(width=_WIDTH)).print(_table(found))
    if not all(each.holds for each in found):
        raise typer.Exit(FAILED)


def _table(found: list[PartitionBounds]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("partition", overflow="fold")
    for heading, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    table.add_column("bounds", overflow="fold")
    for each in found:
        numbers = [getattr(each, field) for _, field in _COLUMNS]
        verdict = each.trouble or ("hold" if each.holds else f"BROKEN: {', '.join(each.violated)}")
        table.add_row(f"{each.topic}-{each.partition}", *("-" if one is None else str(one) for one in numbers), verdict)
    return table


async def read_bounds(config: TidegateConfig, topic: str | None) -> list[PartitionBounds]:
    """Of every partition with remote metadata, or of one topic's. Raises `RemoteTierError` in one line."""
    async with tiered_cluster(config) as (client, cluster):
        if topic is not None and topic not in cluster.topics:
            raise RemoteTierError(f"the cluster has no topic {topic}")
        with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
            return await _read(config, client, cluster, topic, Path(folder))


async def _cluster(config: TidegateConfig, client: BrokerClient) -> ClusterMetadata:
    try:
        return await client.metadata(0, TIMEOUT_MS)
    except BrokerError as error:
        servers = ", ".join(f"{host}:{port}" for host, port in config.upstream.bootstrap_servers)
        raise RemoteTierError(f"no broker answers at {servers}: {error}") from error


async def _read(
    config: TidegateConfig, client: BrokerClient, cluster: ClusterMetadata, topic: str | None, folder: Path
) -> list[PartitionBounds]:
    async with metadata_to_now(config, client, folder) as metadata:
        partitions = _asked_for(cluster, metadata, topic)
        source, slots = BrokerLogSource(client), asyncio.Semaphore(_PARTITIONS_AT_ONCE)

        async def of(partition: TopicIdPartition) -> PartitionBounds:
            async with slots:
                return await partition_bounds(source, cluster, metadata, partition)

        async with asyncio.TaskGroup() as tasks:
            looking = [tasks.create_task(of(partition)) for partition in partitions]
        return [look.result() for look in looking]


@asynccontextmanager
async def metadata_to_now(
    config: TidegateConfig, client: BrokerClient, folder: Path
) -> AsyncIterator[TopicBasedRemoteLogMetadataManager]:
    """Everything that the metadata topic says; `folder` is for this alone."""
    remote_log = config.remote_log
    metadata_topic = MetadataTopicSettings(remote_log.metadata_topic, remote_log.metadata_topic_partitions)
    settings = TopicBasedSettings(folder, topic=metadata_topic, is_member=False, open_timeout_ms=TIMEOUT_MS)
    metadata = TopicBasedRemoteLogMetadataManager(client, settings)
    try:
        await metadata.open()
        for number in range(metadata.topic.partition_count):
            await metadata.follower.ensure_fresh(number, TIMEOUT_MS, TIMEOUT_MS)
        yield metadata
    finally:
        await metadata.close()


@asynccontextmanager
async def tiered_cluster(
    config: TidegateConfig, *, is_new: bool = False
) -> AsyncIterator[tuple[BrokerClient, ClusterMetadata]]:
    """Raises `RemoteTierError` in one line, of whatever is done in it too. `is_new`: nothing need be tiered yet."""
    client = broker_client(config)
    try:
        cluster = await _cluster(config, client)
        metadata_topic = config.remote_log.metadata_topic
        if metadata_topic not in cluster.topics and not is_new:
            # Opening the manager would create it; a command only looks.
            raise RemoteTierError(f"the cluster has no topic {metadata_topic}: nothing was tiered yet")
        yield client, cluster
    except RemoteLogError as error:
        raise RemoteTierError(str(error)) from error
    finally:
        await client.close()


def _asked_for(
    cluster: ClusterMetadata, metadata: RemoteLogMetadataReader, topic: str | None
) -> list[TopicIdPartition]:
    if topic is None:
        partitions = metadata.partitions()
    else:
        known = cluster.topics[topic]
        partitions = [TopicIdPartition(known.topic_id, number, topic) for number in known.partitions]
    return sorted(partitions, key=lambda each: (each.topic, each.topic_id, each.partition))


async def partition_bounds(
    source: BrokerLogSource, cluster: ClusterMetadata, metadata: RemoteLogMetadataReader, partition: TopicIdPartition
) -> PartitionBounds:
    """What the leader cannot tell is trouble in the answer, not an error."""
    remote_start, remote_end = metadata.earliest_offset(partition), metadata.remote_end_offset(partition)
    log_start_offset = metadata.log_start_offset(partition)
    pending_upload = None if remote_end is None else remote_end + 1

    def known(trouble: str) -> PartitionBounds:
        return PartitionBounds(
            partition.topic,
            partition.partition,
            log_start_offset,
            remote_start,
            remote_end,
            pending_upload,
            trouble=trouble,
        )

    if partition.topic_id not in cluster.topics_by_id:
        return known("the topic was deleted")
    try:
        local = await source.bounds(partition, TIMEOUT_MS)
    except RemoteLogError as error:
        return known(str(error))
    return PartitionBounds(
        topic=partition.topic,
        partition=partition.partition,
        log_start_offset=local.log_start_offset if log_start_offset is None else log_start_offset,
        remote_start=remote_start,
        remote_end=remote_end,
        pending_upload=local.log_start_offset if pending_upload is None else pending_upload,
        local_log_start=local.log_start_offset,
        last_stable_offset=local.last_stable_offset,
        high_watermark=local.high_watermark,
        violated=tuple(violated_bounds(local, remote_start, remote_end)),
    )
