"""`tidegate tier usage`: what every partition takes in the store, indexes, manifest and encryption included.

By metadata it counts what is known: each segment's `.indexes` object is read (a GET per segment), for it says how long
the stored log is. `--by-listing` adds up the objects that the store lists (a LIST per thousand), known or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated
from uuid import UUID

import typer

from proxy.commands.tools import Concurrency, OptionalTarget, parse_target, partitions_of, run_command
from proxy.config import load_config
from tiers.console import AsJson, ConfigFile, progress_bar, show_json, show_table
from tiers.errors import RemoteResourceNotFoundError
from tiers.manager.segment_verification import persistently
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.open_tier import OpenTier, each_of, open_tier, readable_segments
from tiers.segment.indexes_object import decode_indexes_object
from tiers.storage.object_key import (
    LOG_SUFFIX,
    parse_partition_manifest_key,
    parse_segment_key,
    partition_manifest_key,
)
from tiers.storage.remote_storage_manager import StoredObject


@dataclass(slots=True)
class PartitionUsage:
    """`overhead_bytes` is what encryption adds to the log, and a part of `log_bytes`; None: a listing cannot tell."""

    topic: str
    topic_id: str
    partition: int | None
    segments: int = 0
    log_bytes: int = 0
    overhead_bytes: int | None = 0
    index_bytes: int = 0
    manifest_bytes: int = 0
    total_bytes: int = field(init=False, default=0)

    def add(self, other: PartitionUsage) -> None:
        self.segments += other.segments
        self.log_bytes += other.log_bytes
        self.index_bytes += other.index_bytes
        self.manifest_bytes += other.manifest_bytes
        self.total_bytes += other.total_bytes
        own = self.overhead_bytes
        self.overhead_bytes = None if own is None or other.overhead_bytes is None else own + other.overhead_bytes

    def add_up(self) -> None:
        self.total_bytes = self.log_bytes + self.index_bytes + self.manifest_bytes


def usage(
    config: ConfigFile,
    target: OptionalTarget = None,
    by_listing: Annotated[
        bool, typer.Option("--by-listing", help="Counts what the store lists, known or not.")
    ] = False,
    concurrency: Concurrency = 16,
    as_json: AsJson = False,
) -> None:
    """Adds up the bytes that the tier takes in the store, per partition and topic."""
    settings = load_config(config)
    parse_target(target)

    async def work() -> list[PartitionUsage]:
        async with open_tier(settings) as tier:
            if by_listing:
                return await listed_usage(tier, target)
            return await known_usage(tier, target, concurrency)

    found = run_command(work)
    source = "listing" if by_listing else "metadata"
    topics = topic_usage(found)
    if as_json:
        show_json({"counted_by": source, "partitions": found, "topics": topics})
        return
    rows = [_row(f"{each.topic}-{each.partition}", each) for each in found]
    rows += [_row(f"{each.topic} (all)", each) for each in topics]
    headings = (
        "partition",
        "segments",
        "log bytes",
        "of it encryption",
        "index bytes",
        "manifest bytes",
        "total bytes",
    )
    show_table(headings, rows, headings[1:])
    typer.echo(f"counted by {source}")


def _row(name: str, each: PartitionUsage) -> tuple[object, ...]:
    return (
        name,
        each.segments,
        each.log_bytes,
        each.overhead_bytes,
        each.index_bytes,
        each.manifest_bytes,
        each.total_bytes,
    )


def topic_usage(found: Iterable[PartitionUsage]) -> list[PartitionUsage]:
    topics: dict[str, PartitionUsage] = {}
    for each in found:
        topics.setdefault(each.topic_id, PartitionUsage(each.topic, each.topic_id, None)).add(each)
    return list(topics.values())


async def known_usage(tier: OpenTier, target: str | None, at_once: int) -> list[PartitionUsage]:
    partitions = partitions_of(tier, target)
    segments = {partition: readable_segments(tier, partition) for partition in partitions}
    every = [each for found in segments.values() for each in found]
    sizes: dict[UUID, tuple[int, int]] = {}

    async def measure(segment: RemoteLogSegmentMetadata) -> None:
        data = await persistently(lambda: tier.storage.fetch_indexes(segment))
        stored = sum(chunk.stored_bytes for chunk in decode_indexes_object(data, segment).chunks())
        sizes[segment.segment_id.id] = stored, len(data)

    with progress_bar("segments", len(every)) as advance:
        await each_of(every, measure, at_once, lambda: advance(1))
    found = []
    for partition in partitions:
        line = PartitionUsage(partition.topic, str(partition.topic_id), partition.partition)
        for segment in segments[partition]:
            log_bytes, index_bytes = sizes[segment.segment_id.id]
            line.segments += 1
            line.log_bytes += log_bytes
            line.index_bytes += index_bytes
            assert line.overhead_bytes is not None
            line.overhead_bytes += log_bytes - segment.segment_size_bytes
        line.manifest_bytes = await _manifest_bytes(tier, partition)
        line.add_up()
        found.append(line)
    return found


async def _manifest_bytes(tier: OpenTier, partition: TopicIdPartition) -> int:
    try:
        return len(await tier.storage.get_object(partition_manifest_key(tier.cluster_id, partition)))
    except RemoteResourceNotFoundError:
        return 0


async def listed_usage(tier: OpenTier, target: str | None) -> list[PartitionUsage]:
    """Without the objects of other clusters, and without what is not the tier's at all."""
    wanted = None if target is None else set(partitions_of(tier, target))
    names = {each: each.topic for each in tier.metadata.partitions()}
    found: dict[TopicIdPartition, PartitionUsage] = {}
    with progress_bar("objects", None) as advance:
        async for stored in tier.storage.list_objects(""):
            advance(1)
            partition = partition_of_object(stored, tier.cluster_id)
            if partition is not None and (wanted is None or partition in wanted):
                topic = names.get(partition, str(partition.topic_id))
                new = PartitionUsage(topic, str(partition.topic_id), partition.partition, overhead_bytes=None)
                _count(found.setdefault(partition, new), stored)
    for line in found.values():
        line.add_up()
    return sorted(found.values(), key=lambda each: (each.topic, each.topic_id, each.partition or 0))


def partition_of_object(stored: StoredObject, cluster_id: str) -> TopicIdPartition | None:
    key = parse_segment_key(stored.key) or parse_partition_manifest_key(stored.key)
    if key is None or key.cluster_id != cluster_id:
        return None
    return TopicIdPartition(key.topic_id, key.partition)


def _count(line: PartitionUsage, stored: StoredObject) -> None:
    segment = parse_segment_key(stored.key)
    if segment is None:
        line.manifest_bytes += stored.size_bytes
    elif segment.suffix == LOG_SUFFIX:
        line.segments += 1
        line.log_bytes += stored.size_bytes
    else:
        line.index_bytes += stored.size_bytes
