"""`BucketScan` collects the objects that a store holds of one cluster's tier, by partition, for `rebuild`.

The scan lists the store once. Then it reads every `.indexes` and every `.facts` object, but no `.log` object. A caller
may also list and read by itself: it passes each listed object to `take`, and what `read_object` returns to `put`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple
from uuid import UUID

from tiers.bounded_gather import bounded_gather
from tiers.errors import CorruptSegmentError, RemoteLogMetadataError, RemoteResourceNotFoundError
from tiers.metadata.partition_facts import PartitionFacts, decode_partition_facts
from tiers.model.ids import TopicIdPartition
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import (
    LOG_SUFFIX,
    FactsKey,
    SegmentObjectKey,
    marked_cluster,
    parse_facts_key,
    parse_segment_key,
    segment_of_key,
)
from tiers.storage.remote_storage_manager import RemoteStorageManager, StoredObject
from tiers.upkeep.rebuild_plan import FoundIndexes, FoundPartition, FoundSegment, content_of

Persistently = Callable[[Callable[[], Awaitable[bytes]]], Awaitable[bytes]]


class IndexesKey(NamedTuple):
    """The key of an `.indexes` object, and the custom metadata that the listing shows for it."""

    key: SegmentObjectKey
    custom_metadata: bytes | None


class BucketScan:
    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self.partitions: dict[tuple[UUID, int], FoundPartition] = {}
        self.other_clusters: set[str] = set()
        self.to_read: list[IndexesKey | FactsKey] = []
        """The objects to read."""

    def take(self, stored: StoredObject) -> None:
        """Takes one object of the listing. The caller passes every object."""
        segment, facts = parse_segment_key(stored.key), parse_facts_key(stored.key)
        named = segment or facts
        cluster_id = marked_cluster(stored.key) if named is None else named.cluster_id
        if cluster_id not in (None, self.cluster_id):
            self.other_clusters.add(str(cluster_id))
            return
        if named is None:
            return
        place = named.topic_id, named.partition
        found = self.partitions.setdefault(place, FoundPartition(TopicIdPartition(*place)))
        if facts is not None:
            self.to_read.append(facts)
        if segment is None:
            return
        one = found.segments.setdefault(segment.segment_uuid, FoundSegment(segment.base_offset, segment.end_offset))
        if segment.suffix == LOG_SUFFIX:
            one.log_bytes = stored.size_bytes
        else:
            self.to_read.append(IndexesKey(segment, stored.custom_metadata))

    def put(self, read: IndexesKey | FactsKey, found: FoundIndexes | PartitionFacts | str) -> None:
        """Keeps what `read_object` returned."""
        if isinstance(read, FactsKey):
            assert not isinstance(found, FoundIndexes)
            self.partitions[read.topic_id, read.partition].facts.append(found)
        else:
            assert not isinstance(found, PartitionFacts)
            key = read.key
            self.partitions[key.topic_id, key.partition].segments[key.segment_uuid].indexes = found

    async def list(self, storage: RemoteStorageManager, on_object: Callable[[int], None] = lambda count: None) -> int:
        """Lists the store, and returns how many objects have to be read."""
        async for stored in storage.list_objects(""):
            on_object(1)
            self.take(stored)
        return len(self.to_read)

    async def read(
        self,
        storage: RemoteStorageManager,
        with_retries: Persistently,
        at_once: int,
        on_object: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Reads the objects that `list` found, `at_once` at a time, by `read_object`."""

        async def one(read: IndexesKey | FactsKey) -> None:
            self.put(read, await read_object(storage, read, with_retries))

        await bounded_gather(self.to_read, one, at_once, lambda: on_object(1))


async def read_object(
    storage: RemoteStorageManager, read: IndexesKey | FactsKey, with_retries: Persistently
) -> FoundIndexes | PartitionFacts | str:
    """Returns what an object holds, or an explanation when it is unreadable.

    `with_retries` repeats a read that may succeed later. Raises `RemoteStorageError` when the store does not answer."""
    try:
        if isinstance(read, FactsKey):
            return _own_facts(read, await with_retries(lambda: storage.get_object(read.key)))
        named = segment_of_key(read.key, read.custom_metadata)
        decoded = decode_indexes_object(await with_retries(lambda: storage.fetch_indexes(named)), named)
    except (CorruptSegmentError, RemoteResourceNotFoundError) as error:
        return str(error)
    facts = _decoded(decoded.indexes.facts) if decoded.indexes.facts else None
    chunks = decoded.chunks()
    return FoundIndexes(
        replace(decoded.metadata, custom_metadata=read.custom_metadata),
        content_of(chunks),
        sum(each.stored_bytes for each in chunks),
        facts,
    )


def _own_facts(read: FactsKey, data: bytes) -> PartitionFacts | str:
    facts = _decoded(data)
    if isinstance(facts, str):
        return facts
    named = facts.cluster_id, facts.topic_id_partition.topic_id, facts.topic_id_partition.partition
    is_own = named == (read.cluster_id, read.topic_id, read.partition)
    return facts if is_own else "the facts belong to another partition or cluster"


def _decoded(data: bytes | memoryview) -> PartitionFacts | str:
    try:
        return decode_partition_facts(data)
    except RemoteLogMetadataError as error:
        return str(error)
