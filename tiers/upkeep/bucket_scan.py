"""`BucketScan` collects the objects that a store holds of one cluster's tier, by partition, for `rebuild`.

The scan lists the store once. Then it reads every `.indexes` and every `.facts` object, but no `.log` object. A caller
may also list and read by itself: it passes each listed object to `take`, and what `read_object` returns to `put`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from uuid import UUID

from tiers.bounded_gather import bounded_gather
from tiers.errors import CorruptSegmentError, RemoteLogMetadataError, RemoteResourceNotFoundError
from tiers.metadata.partition_facts import PartitionFacts, decode_partition_facts
from tiers.model.ids import TopicIdPartition
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import (
    LOG_SUFFIX,
    FactsKey,
    marked_cluster,
    parse_facts_key,
    parse_segment_key,
    segment_of_key,
)
from tiers.storage.remote_storage_manager import RemoteStorageManager, StoredObject
from tiers.upkeep.rebuild_plan import FoundIndexes, FoundPartition, FoundSegment, content_of

Persistently = Callable[[Callable[[], Awaitable[bytes]]], Awaitable[bytes]]
Found = FoundIndexes | PartitionFacts | str
"""What an object holds. A text says why it cannot be read."""


class BucketScan:
    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self.partitions: dict[tuple[UUID, int], FoundPartition] = {}
        self.other_clusters: set[str] = set()
        self.to_read: list[StoredObject] = []

    def take(self, stored: StoredObject) -> None:
        """Takes one object of the listing. The caller passes every object."""
        segment = parse_segment_key(stored.key)
        named = segment or parse_facts_key(stored.key)
        cluster_id = marked_cluster(stored.key) if named is None else named.cluster_id
        if cluster_id not in (None, self.cluster_id):
            self.other_clusters.add(str(cluster_id))
        elif named is not None:
            place = named.topic_id, named.partition
            found = self.partitions.setdefault(place, FoundPartition(TopicIdPartition(*place)))
            if segment is not None:
                one = FoundSegment(segment.base_offset, segment.end_offset)
                one = found.segments.setdefault(segment.segment_uuid, one)
                if segment.suffix == LOG_SUFFIX:
                    one.log_bytes = stored.size_bytes
                    return
            self.to_read.append(stored)

    def put(self, stored: StoredObject, found: Found) -> None:
        """Keeps what `read_object` returned."""
        segment = parse_segment_key(stored.key)
        named = segment or parse_facts_key(stored.key)
        assert named is not None
        partition = self.partitions[named.topic_id, named.partition]
        if segment is None:
            assert not isinstance(found, FoundIndexes)
            partition.facts.append(found)
        else:
            assert not isinstance(found, PartitionFacts)
            partition.segments[segment.segment_uuid].indexes = found

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

        async def one(stored: StoredObject) -> None:
            self.put(stored, await read_object(storage, stored, with_retries))

        await bounded_gather(self.to_read, one, at_once, lambda: on_object(1))


async def read_object(storage: RemoteStorageManager, stored: StoredObject, with_retries: Persistently) -> Found:
    """Reads an `.indexes` or a `.facts` object.

    `with_retries` repeats a read that may succeed later. Raises `RemoteStorageError` when the store does not answer."""
    key, facts_key = parse_segment_key(stored.key), parse_facts_key(stored.key)
    try:
        if facts_key is not None:
            facts = decode_partition_facts(await with_retries(lambda: storage.get_object(stored.key)))
            of = facts.topic_id_partition
            is_own = facts_key == FactsKey(facts.cluster_id, of.topic_id, of.partition, stored.key)
            return facts if is_own else "the facts belong to another partition or cluster"
        assert key is not None
        named = segment_of_key(key, stored.custom_metadata)
        decoded = decode_indexes_object(await with_retries(lambda: storage.fetch_indexes(named)), named)
    except (CorruptSegmentError, RemoteResourceNotFoundError, RemoteLogMetadataError) as error:
        return str(error)
    known: PartitionFacts | str | None = None
    try:
        known = decode_partition_facts(decoded.indexes.facts) if decoded.indexes.facts else None
    except RemoteLogMetadataError as error:
        known = str(error)
    chunks = decoded.chunks()
    return FoundIndexes(
        replace(decoded.metadata, custom_metadata=stored.custom_metadata),
        content_of(chunks),
        sum(each.stored_bytes for each in chunks),
        known,
    )
