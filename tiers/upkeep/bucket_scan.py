"""`BucketScan` collects the objects that a store holds of one cluster's tier, by partition, for `rebuild`.

The scan lists the store once. Then it reads every `.indexes` and every `.facts` object, but no `.log` object. A caller
may also list and read by itself: it passes each listed object to `take`, and each object that it read to `put_indexes`
or `put_facts`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from itertools import chain
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
        self.indexes: list[IndexesKey] = []
        """The `.indexes` objects to read. `facts` has the `.facts` objects to read."""
        self.facts: list[FactsKey] = []

    def take(self, stored: StoredObject) -> None:
        """Takes one object of the listing. The caller passes every object."""
        segment, facts = parse_segment_key(stored.key), parse_facts_key(stored.key)
        named = segment or facts
        if named is None:
            if marked_cluster(stored.key) not in (None, self.cluster_id):
                self.other_clusters.add(str(marked_cluster(stored.key)))
            return
        if named.cluster_id != self.cluster_id:
            self.other_clusters.add(named.cluster_id)
            return
        place = named.topic_id, named.partition
        found = self.partitions.setdefault(place, FoundPartition(TopicIdPartition(*place)))
        if facts is not None:
            self.facts.append(facts)
        if segment is None:
            return
        one = found.segments.setdefault(segment.segment_uuid, FoundSegment(segment.base_offset, segment.end_offset))
        if segment.suffix == LOG_SUFFIX:
            one.log_bytes = stored.size_bytes
        else:
            self.indexes.append(IndexesKey(segment, stored.custom_metadata))

    def put_indexes(self, read: IndexesKey, found: FoundIndexes | str) -> None:
        key = read.key
        self.partitions[key.topic_id, key.partition].segments[key.segment_uuid].indexes = found

    def put_facts(self, read: FactsKey, found: PartitionFacts | str) -> None:
        self.partitions[read.topic_id, read.partition].facts.append(found)

    async def list(self, storage: RemoteStorageManager, on_object: Callable[[int], None] = lambda count: None) -> int:
        """Lists the store, and returns how many objects have to be read."""
        async for stored in storage.list_objects(""):
            on_object(1)
            self.take(stored)
        return len(self.indexes) + len(self.facts)

    async def read(
        self,
        storage: RemoteStorageManager,
        with_retries: Persistently,
        at_once: int,
        on_object: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Reads the objects that `list` found, `at_once` at a time.

        `with_retries` repeats a read that may succeed later. Raises `RemoteStorageError` when the store does not
        answer."""

        async def one(read: FactsKey | IndexesKey) -> None:
            if isinstance(read, FactsKey):
                self.put_facts(read, await read_facts(storage, read, with_retries))
            else:
                self.put_indexes(read, await read_indexes(storage, read, with_retries))

        reads: Iterable[FactsKey | IndexesKey] = chain(self.facts, self.indexes)
        await bounded_gather(reads, one, at_once, lambda: on_object(1))


async def read_facts(storage: RemoteStorageManager, read: FactsKey, with_retries: Persistently) -> PartitionFacts | str:
    """Returns the facts, or an explanation when they are unreadable. Raises `RemoteStorageError`.

    The error means that the store does not answer."""
    try:
        facts = _decoded(await with_retries(lambda: storage.get_object(read.key)))
    except RemoteResourceNotFoundError as error:
        return str(error)
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


async def read_indexes(
    storage: RemoteStorageManager, read: IndexesKey, with_retries: Persistently
) -> FoundIndexes | str:
    """Returns the indexes, or an explanation when they are unreadable. Raises `RemoteStorageError`.

    The error means that the store does not answer."""
    named = segment_of_key(read.key, read.custom_metadata)
    try:
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
