"""What every partition takes in the store, indexes, manifest and encryption included.

By metadata it counts what is known: each segment's `.indexes` object is read (a GET per segment), for it says how long
the stored log is. By listing it adds up the objects that the store lists (a LIST per thousand), known or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from tiers.console import progress_bar
from tiers.errors import RemoteResourceNotFoundError
from tiers.manager.segment_verification import persistently
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.open_tier import OpenTier, each_of, readable_segments
from tiers.segment.indexes_object import decode_indexes_object
from tiers.storage.object_key import (
    LOG_SUFFIX,
    parse_partition_manifest_key,
    parse_segment_key,
    partition_manifest_key,
)
from tiers.storage.remote_storage_manager import RemoteStorageManager, StoredObject


class StoredSizes(NamedTuple):
    """Of a segment's two objects."""

    log_bytes: int
    index_bytes: int


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


async def stored_sizes(storage: RemoteStorageManager, segment: RemoteLogSegmentMetadata) -> StoredSizes:
    """One GET. Raises `RemoteStorageError`, `CorruptSegmentError`."""
    data = await persistently(lambda: storage.fetch_indexes(segment))
    stored = decode_indexes_object(data, segment).chunks()
    return StoredSizes(sum(chunk.stored_bytes for chunk in stored), len(data))


async def manifest_bytes(storage: RemoteStorageManager, cluster_id: str, partition: TopicIdPartition) -> int:
    key = partition_manifest_key(cluster_id, partition)
    try:
        return len(await persistently(lambda: storage.get_object(key)))
    except RemoteResourceNotFoundError:
        return 0


def topic_usage(found: Iterable[PartitionUsage]) -> list[PartitionUsage]:
    topics: dict[str, PartitionUsage] = {}
    for each in found:
        topics.setdefault(each.topic_id, PartitionUsage(each.topic, each.topic_id, None)).add(each)
    return list(topics.values())


async def known_usage(tier: OpenTier, partitions: Sequence[TopicIdPartition], at_once: int) -> list[PartitionUsage]:
    segments = {partition: readable_segments(tier, partition) for partition in partitions}
    every = [each for found in segments.values() for each in found]
    sizes: dict[UUID, StoredSizes] = {}

    async def measure(segment: RemoteLogSegmentMetadata) -> None:
        sizes[segment.segment_id.id] = await stored_sizes(tier.storage, segment)

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
        line.manifest_bytes = await manifest_bytes(tier.storage, tier.cluster_id, partition)
        line.add_up()
        found.append(line)
    return found


async def listed_usage(tier: OpenTier, wanted: Set[TopicIdPartition] | None) -> list[PartitionUsage]:
    """Of `wanted`, or of everything: without the objects of other clusters, and of what is not the tier's at all."""
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
