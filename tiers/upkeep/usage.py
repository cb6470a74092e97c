"""Measures the size of every partition in the store, including indexes, manifest and encryption.

`known_usage` counts the segments in the metadata. It reads the `.indexes` object of each segment (one GET per segment),
because that object has the size of the stored log. `listed_usage` adds up all objects that the store lists (one LIST
per thousand objects), including those that the metadata does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from tiers.access.open_tier import OpenTier
from tiers.bounded_gather import bounded_gather
from tiers.errors import CorruptSegmentError, RemoteResourceNotFoundError
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.stored_segment import StoredSegment
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import (
    LOG_SUFFIX,
    parse_partition_manifest_key,
    parse_segment_key,
    partition_manifest_key,
)
from tiers.storage.remote_storage_manager import RemoteStorageManager, StoredObject
from tiers.storage.retries import with_retries


class StoredSizes(NamedTuple):
    """The sizes of a segment's two objects."""

    log_bytes: int
    index_bytes: int


@dataclass(slots=True)
class PartitionUsage:
    """The size of a partition in the store, or of a topic if `partition` is None.

    `overhead_bytes` is the part of `log_bytes` that encryption adds; None if the sizes come from a listing, which does
    not show it. `unreadable` has a message for each segment whose `.indexes` object is missing or damaged. Such a
    segment counts with the size of its log."""

    topic: str
    topic_id: str
    partition: int | None
    segments: int = 0
    log_bytes: int = 0
    overhead_bytes: int | None = 0
    index_bytes: int = 0
    manifest_bytes: int = 0
    total_bytes: int = field(init=False, default=0)
    unreadable: list[str] = field(default_factory=list)

    def add(self, other: PartitionUsage) -> None:
        self.segments += other.segments
        self.log_bytes += other.log_bytes
        self.index_bytes += other.index_bytes
        self.manifest_bytes += other.manifest_bytes
        self.total_bytes += other.total_bytes
        self.unreadable += other.unreadable
        own = self.overhead_bytes
        self.overhead_bytes = None if own is None or other.overhead_bytes is None else own + other.overhead_bytes

    def add_up(self) -> None:
        self.total_bytes = self.log_bytes + self.index_bytes + self.manifest_bytes


async def stored_sizes(storage: RemoteStorageManager, segment: RemoteLogSegmentMetadata) -> StoredSizes:
    """Returns the sizes of a segment's objects by one GET. Raises `RemoteStorageError`, `CorruptSegmentError`."""
    data = await with_retries(lambda: storage.fetch_indexes(segment))
    stored = decode_indexes_object(data, segment).chunks()
    return StoredSizes(sum(chunk.stored_bytes for chunk in stored), len(data))


async def manifest_bytes(storage: RemoteStorageManager, cluster_id: str, partition: TopicIdPartition) -> int:
    key = partition_manifest_key(cluster_id, partition)
    try:
        return len(await with_retries(lambda: storage.get_object(key)))
    except RemoteResourceNotFoundError:
        return 0


def topic_usage(found: Iterable[PartitionUsage]) -> list[PartitionUsage]:
    topics: dict[str, PartitionUsage] = {}
    for each in found:
        topics.setdefault(each.topic_id, PartitionUsage(each.topic, each.topic_id, None)).add(each)
    return list(topics.values())


async def known_usage(tier: OpenTier, partitions: Sequence[TopicIdPartition], at_once: int) -> list[PartitionUsage]:
    """Returns the usage of the partitions by their metadata. Raises `RemoteStorageError` when the store fails."""
    lines = {each: PartitionUsage(each.topic, str(each.topic_id), each.partition) for each in partitions}

    async def measure(segment: RemoteLogSegmentMetadata) -> None:
        line = lines[segment.topic_id_partition]
        try:
            log_bytes, index_bytes = await stored_sizes(tier.storage, segment)
        except (CorruptSegmentError, RemoteResourceNotFoundError) as error:
            log_bytes, index_bytes = segment.segment_size_bytes, 0
            line.unreadable.append(f"{segment.segment_id.id}: {error}")
        line.segments += 1
        line.log_bytes += log_bytes
        line.index_bytes += index_bytes
        assert line.overhead_bytes is not None
        line.overhead_bytes += log_bytes - segment.segment_size_bytes

    count = sum(1 for _ in _finished(tier, partitions))
    with tier.progress.bar("segments", count) as advance:
        await bounded_gather(
            (each.metadata for each in _finished(tier, partitions)), measure, at_once, lambda: advance(1)
        )
    sizes = await bounded_gather(partitions, lambda each: manifest_bytes(tier.storage, tier.cluster_id, each), at_once)
    for line, size_bytes in zip(lines.values(), sizes, strict=True):
        line.manifest_bytes = size_bytes
        line.add_up()
    return list(lines.values())


def _finished(tier: OpenTier, partitions: Sequence[TopicIdPartition]) -> Iterator[StoredSegment]:
    return (one for each in partitions for one in tier.metadata.stored_segments(each) if one.is_finished)


async def listed_usage(tier: OpenTier, wanted: Set[TopicIdPartition] | None) -> list[PartitionUsage]:
    """Returns the usage by a listing of the store, for `wanted` or, if that is None, for all partitions.

    Objects of other clusters and objects that are not the tier's do not count.
    """
    names = {each: each.topic for each in tier.metadata.partitions()}
    found: dict[TopicIdPartition, PartitionUsage] = {}
    with tier.progress.bar("objects", None) as advance:
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
