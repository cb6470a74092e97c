"""Writes many records to the metadata topic, for a command or a job that imports metadata."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from tiers.access.open_tier import TIMEOUT_MS, RemoteTierError, metadata_to_now, read_all
from tiers.access.progress import SILENCE, Progress
from tiers.broker.client import BrokerClient
from tiers.config.tier_config import TierConfig
from tiers.metadata.topic.metadata_producer import KeyAndValue
from tiers.metadata.topic.topic_based import TopicBasedRemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.upkeep.record_import import count_owners, write_records

WRITER = "tidegate-import"
"""The writer in the log start records of an import."""
_WRITE_TIMEOUT_MS = 8_000

RecordsOf = Callable[[TopicBasedRemoteLogMetadataManager], Sequence[tuple[TopicIdPartition, Sequence[KeyAndValue]]]]


async def refuse_beside_owners(config: TierConfig, client: BrokerClient) -> None:
    """Raises `RemoteTierError` while any process owns partitions of the metadata topic."""
    topic = config.remote_log.metadata_topic
    owners = await count_owners(client, topic, TIMEOUT_MS)
    if owners:
        raise RemoteTierError(
            f"{owners} processes own partitions of {topic}: stop every `tidegate serve` of this cluster, and wait "
            "until their sessions end"
        )


async def records_read(
    config: TierConfig,
    client: BrokerClient,
    look: Callable[[TopicBasedRemoteLogMetadataManager], Awaitable[None]],
    progress: Progress = SILENCE,
) -> int:
    """Returns the number of used offsets of an existing metadata topic; 0 when it was never written to.

    Calls `look` with the metadata as of now."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
        async with metadata_to_now(config, client, Path(folder), progress=progress) as metadata:
            await look(metadata)
            return _taken(metadata)


async def write_all(
    config: TierConfig,
    client: BrokerClient,
    records_of: RecordsOf,
    check: Callable[[TopicBasedRemoteLogMetadataManager], None],
    *,
    into_empty: bool,
    progress: Progress = SILENCE,
) -> None:
    """Writes the records of `records_of`, and then passes the metadata that results to `check`.

    Creates the metadata topic if it is missing. With `into_empty`, an existing topic must be empty. Raises
    `RemoteTierError`."""
    await refuse_beside_owners(config, client)
    with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
        async with metadata_to_now(config, client, Path(folder), progress=progress) as metadata:
            if into_empty and _taken(metadata):
                raise RemoteTierError(f"topic {metadata.topic.name} is not empty: delete it, or name another topic")
            by_partition: dict[int, list[KeyAndValue]] = {}
            for partition, records in records_of(metadata):
                by_partition.setdefault(metadata.metadata_partition(partition), []).extend(records)
            await _write(client, metadata, by_partition, progress)
            await read_all(metadata.follower, metadata.topic, 0, TIMEOUT_MS)
            check(metadata)


async def _write(
    client: BrokerClient,
    metadata: TopicBasedRemoteLogMetadataManager,
    records: Mapping[int, Sequence[KeyAndValue]],
    progress: Progress,
) -> None:
    with progress.bar("records", sum(map(len, records.values()))) as advance:
        await write_records(client, metadata.topic, records, _WRITE_TIMEOUT_MS, advance)


def _taken(metadata: TopicBasedRemoteLogMetadataManager) -> int:
    return sum(metadata.follower.position(number) for number in range(metadata.topic.partition_count))
