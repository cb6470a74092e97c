"""The partition manifest as the store has it: what the metadata makes of it, and how it is read, replaced and removed.

Replacing it is one rule for owners, jobs and `rebuild`: read, decide, and write over the version that was read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count

from tiers.errors import (
    MetadataLostError,
    ObjectChangedError,
    OwnershipLostError,
    RemoteLogMetadataError,
    RemoteLogMetadataNotReadyError,
    RemoteResourceNotFoundError,
)
from tiers.metadata.partition_manifest import (
    ManifestSegment,
    PartitionManifest,
    decode_partition_manifest,
    encode_partition_manifest,
)
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogStart
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.storage.object_key import partition_manifest_key
from tiers.storage.remote_storage_manager import RemoteStorageManager, VersionedObject
from tiers.tasks.history.stop_check import lacks_settings
from tiers.tasks.task_services import TaskServices

_ATTEMPTS = 3
"""How often a conditional write of a manifest is tried."""
WAY_BACK = (
    "`tidegate tier rebuild` restores the metadata from the store; `tidegate tier accept` reads back what only the"
    " store knows, and goes on without the rest (docs/operations.md, 'A partition stops')"
)


def manifest_of(metadata: RemoteLogMetadataManager, cluster_id: str, partition: TopicIdPartition) -> PartitionManifest:
    segments = list(metadata.list_remote_log_segments(partition))
    tier_config = dict(metadata.topic_tier_config(partition.topic_id))
    return PartitionManifest(
        cluster_id=cluster_id,
        topic_id_partition=partition,
        log_start=next(iter(metadata.log_starts(partition)), None),
        local_log_start=metadata.local_log_start(partition),
        position=metadata.position(partition),
        gaps=tuple(metadata.gaps(partition)),
        cuts=tuple(metadata.cuts(partition)),
        segments=tuple(
            ManifestSegment(
                id=each.segment_id.id,
                start_offset=each.start_offset,
                end_offset=each.end_offset,
                size_bytes=each.segment_size_bytes,
                leader_epochs=each.segment_leader_epochs,
                leader_epoch=each.leader_epoch,
                custom_metadata=each.custom_metadata,
            )
            for each in segments
            if each.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        ),
        # A copy that did not end is not dead: it may end after the manifest was written.
        dead=tuple(
            sorted(
                each.segment_id.id
                for each in (*segments, *metadata.deleted_segments(partition))
                if each.state >= RemoteLogSegmentState.DELETE_SEGMENT_STARTED
            )
        ),
        tier_config=tier_config,
        settings_position=metadata.position(partition.of_settings) if tier_config else None,
    )


async def read_manifest(storage: RemoteStorageManager, cluster_id: str, partition: TopicIdPartition) -> bytes | None:
    """Returns the stored manifest, whether or not it can be decoded; None: the store has none."""
    try:
        return bytes(await storage.get_object(partition_manifest_key(cluster_id, partition)))
    except RemoteResourceNotFoundError:
        return None


async def check_positions(services: TaskServices, manifest: PartitionManifest) -> None:
    """Raises `MetadataLostError` when the metadata topic does not reach a position of the manifest any more.

    A position in another metadata topic does not count: `rebuild` or `import` made the present topic. But only
    `rebuild` restores the total retention and the pauses."""
    timeout_ms = services.settings.request_timeout_ms
    if lacks_settings(services.metadata, manifest):
        raise MetadataLostError(
            f"the metadata lacks the total retention or a pause of {manifest.topic_id_partition.topic}, which the"
            f" manifest of {manifest.topic_id_partition} has: {WAY_BACK}"
        )
    for partition, position in manifest.positions():
        if position.topic_id != services.metadata.position(partition).topic_id:
            continue
        if not await services.metadata.confirms(partition, position, timeout_ms):
            raise MetadataLostError(
                f"the metadata of {partition} reached offset {position.next_offset} when the manifest of"
                f" {manifest.topic_id_partition} was written, and lost records since: {WAY_BACK}"
            )


async def refuse_to_forget(services: TaskServices, partition: TopicIdPartition, manifest: PartitionManifest) -> None:
    """Raises `MetadataLostError` when the metadata does not know a segment that the manifest accepts.

    Metadata was lost, or another cluster with the same ids uses the same place. It raises only if the store still has
    one of these segments, and no log start covers it. One missing object does not show that the other segments are gone
    too."""
    metadata = services.metadata
    log_starts = metadata.log_starts(partition)
    unknown = [
        each
        for each in manifest.segments
        if not (_is_known_as_finished(metadata, partition, each) or any(_deletes(start, each) for start in log_starts))
    ]
    for each in sorted(unknown, key=lambda segment: segment.end_offset, reverse=True):
        try:
            await services.storage.fetch_indexes(each.metadata(partition))
            break
        except RemoteResourceNotFoundError:
            continue  # the segment was deleted after the manifest was written
    else:
        return
    if not metadata.owns(partition):
        raise OwnershipLostError(f"{partition} is owned by another member, which has newer metadata")
    raise MetadataLostError(
        f"the store has {len(unknown)} accepted segments of {partition} that the metadata does not know: metadata"
        f" was lost: {WAY_BACK}"
    )


def _is_known_as_finished(
    metadata: RemoteLogMetadataManager, partition: TopicIdPartition, segment: ManifestSegment
) -> bool:
    """Whether the metadata knows the segment as finished, or its deletion has begun.

    The deletion may be newer than the manifest."""
    known = metadata.remote_log_segment_metadata_by_id(RemoteLogSegmentId(partition, segment.id))
    return known is not None and known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED


def _deletes(start: LogStart, segment: ManifestSegment) -> bool:
    """Whether the whole segment lies below the log start. A segment of a later leader epoch has another history."""
    return segment.end_offset < start.offset and start.may_follow(segment.end_offset, segment.leader_epochs[-1].epoch)


async def check_stored_manifest(services: TaskServices, partition: TopicIdPartition) -> None:
    """Does what `check_positions` and `refuse_to_forget` do, for the stored manifest. Costs one GET.

    A missing or unreadable manifest is no witness. For a caller that deletes by the topic's settings, and keeps no
    manifest itself."""
    manifest = readable_manifest(await read_manifest(services.storage, services.cluster_id, partition))
    if manifest is not None and manifest.topic_id_partition == partition:
        await check_positions(services, manifest)
        await refuse_to_forget(services, partition, manifest)


def readable_manifest(stored: bytes | None) -> PartitionManifest | None:
    """Returns the manifest; None without a readable one."""
    try:
        return None if stored is None else decode_partition_manifest(stored)
    except RemoteLogMetadataError:
        return None


async def overwrite_manifest(
    storage: RemoteStorageManager,
    cluster_id: str,
    partition: TopicIdPartition,
    decide: Callable[[VersionedObject], Awaitable[PartitionManifest | None]],
) -> PartitionManifest | None:
    """Replaces the stored manifest by what `decide` makes of it. Returns what was written; None: nothing.

    `decide` gets the stored object, and returns None or raises if they must stay. Where conditional writes are proved,
    it decides again if another writer was faster. Raises the store's errors."""
    key = partition_manifest_key(cluster_id, partition)
    for attempt in count(1):
        found = await storage.get_versioned(key)
        manifest = await decide(found)
        if manifest is None:
            return None
        try:
            await storage.put_object(key, encode_partition_manifest(manifest), found.version)
        except ObjectChangedError:
            if attempt == _ATTEMPTS:
                raise
        else:
            return manifest
    return None


async def bury_manifest(services: TaskServices, partition: TopicIdPartition) -> None:
    """Rewrites the manifest of a partition whose whole remote log is about to be deleted: every segment is dead.

    Unfinished copies are too. Does nothing if the deletion of every segment has begun. Raises the store's errors,
    `OwnershipLostError` and, before anything is deleted, the errors of `refuse_to_forget`."""

    async def buried(stored: VersionedObject) -> PartitionManifest | None:
        other = readable_manifest(stored.data)
        if other is not None and other.is_later_than(services.metadata.position(partition)):
            raise RemoteLogMetadataNotReadyError(f"the manifest of {partition} is that of a newer owner")
        if other is not None:
            await refuse_to_forget(services, partition, other)
        services.require_ownership(partition)
        manifest = manifest_of(services.metadata, services.cluster_id, partition)
        left = {each.segment_id.id for each in services.metadata.list_remote_log_segments(partition)}
        dead = tuple(sorted(left.union(manifest.dead)))
        return None if dead == manifest.dead else replace(manifest, segments=(), dead=dead)

    await overwrite_manifest(services.storage, services.cluster_id, partition, buried)


async def delete_manifest(services: TaskServices, partition: TopicIdPartition) -> None:
    """Deletes the manifest of a deleted topic's partition, as the last object of it.

    Raises the errors of `refuse_to_forget`, and those of the store."""
    stored = readable_manifest(await read_manifest(services.storage, services.cluster_id, partition))
    if stored is not None:
        await refuse_to_forget(services, partition, stored)
    await services.storage.delete_object(partition_manifest_key(services.cluster_id, partition))
