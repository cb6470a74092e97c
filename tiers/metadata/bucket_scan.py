"""`scan_bucket`: everything that a store holds of one cluster's tier, by partition, as `rebuild` judges it.

The store is listed once; then every `.indexes` object and every partition manifest is read, never a `.log`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from uuid import UUID

from tiers.errors import CorruptSegmentError, RemoteLogMetadataError, RemoteResourceNotFoundError
from tiers.metadata.partition_manifest import decode_partition_manifest
from tiers.metadata.rebuild import FoundIndexes, FoundPartition, FoundSegment, content_of
from tiers.model.ids import TopicIdPartition
from tiers.segment.indexes_object import decode_indexes_object
from tiers.storage.object_key import (
    LOG_SUFFIX,
    SegmentObjectKey,
    parse_partition_manifest_key,
    parse_segment_key,
    partition_manifest_key,
    segment_of_key,
)
from tiers.storage.remote_storage_manager import RemoteStorageManager, StoredObject

Persistently = Callable[[Callable[[], Awaitable[bytes]]], Awaitable[bytes]]


class BucketScan:
    """`persistently` repeats a read whose failure may pass."""

    def __init__(self, storage: RemoteStorageManager, cluster_id: str, persistently: Persistently) -> None:
        self._storage = storage
        self._cluster_id = cluster_id
        self._persistently = persistently
        self.partitions: dict[tuple[UUID, int], FoundPartition] = {}
        self.other_clusters: set[str] = set()
        self._indexes: list[tuple[SegmentObjectKey, StoredObject]] = []
        self._manifests: list[FoundPartition] = []

    async def list(self, on_object: Callable[[int], None] = lambda count: None) -> int:
        """How many objects are to be read."""
        async for stored in self._storage.list_objects(""):
            on_object(1)
            segment, manifest = parse_segment_key(stored.key), parse_partition_manifest_key(stored.key)
            named = segment or manifest
            if named is None:
                continue
            if named.cluster_id != self._cluster_id:
                self.other_clusters.add(named.cluster_id)
                continue
            place = named.topic_id, named.partition
            found = self.partitions.setdefault(place, FoundPartition(TopicIdPartition(*place)))
            if segment is None:
                self._manifests.append(found)
                continue
            one = found.segments.setdefault(segment.segment_uuid, FoundSegment(segment.base_offset, segment.end_offset))
            if segment.suffix == LOG_SUFFIX:
                one.log_bytes = stored.size_bytes
            else:
                self._indexes.append((segment, stored))
        return len(self._indexes) + len(self._manifests)

    async def read(self, at_once: int, on_object: Callable[[int], None] = lambda count: None) -> None:
        """After `list`. Raises `RemoteStorageError` when the store cannot be asked."""
        slots = asyncio.Semaphore(at_once)

        async def one(work: Awaitable[None]) -> None:
            async with slots:
                await work
            on_object(1)

        try:
            async with asyncio.TaskGroup() as group:
                for found in self._manifests:
                    group.create_task(one(self._read_manifest(found)))
                for key, stored in self._indexes:
                    group.create_task(one(self._read_indexes(key, stored)))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _read_manifest(self, found: FoundPartition) -> None:
        key = partition_manifest_key(self._cluster_id, found.topic_id_partition)
        try:
            manifest = decode_partition_manifest(await self._persistently(lambda: self._storage.get_object(key)))
        except (RemoteLogMetadataError, RemoteResourceNotFoundError) as error:
            found.manifest = str(error)
            return
        if manifest.topic_id_partition == found.topic_id_partition and manifest.cluster_id == self._cluster_id:
            found.manifest = manifest
        else:
            found.manifest = "the manifest is of another partition or cluster"

    async def _read_indexes(self, key: SegmentObjectKey, stored: StoredObject) -> None:
        segment = self.partitions[key.topic_id, key.partition].segments[key.segment_uuid]
        named = segment_of_key(key, stored.custom_metadata)
        try:
            data = await self._persistently(lambda: self._storage.fetch_indexes(named))
            decoded = decode_indexes_object(data, named)
        except (CorruptSegmentError, RemoteResourceNotFoundError) as error:
            segment.indexes = str(error)
            return
        chunks = decoded.chunks()
        segment.indexes = FoundIndexes(
            replace(decoded.metadata, custom_metadata=stored.custom_metadata),
            content_of(chunks),
            sum(each.stored_bytes for each in chunks),
        )
