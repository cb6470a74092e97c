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
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.storage.object_key import partition_manifest_key
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.history.stop_check import lacks_settings
from tiers.tasks.task_services import TaskServices

_ATTEMPTS = 3
"""How often a conditional write of a manifest is tried."""
WAY_BACK = (
    "`tidegate tier rebuild` restores the metadata from the store; `tidegate tier accept` goes on without it"
    " (docs/operations.md, 'A partition stops')"
)


def manifest_of(metadata: RemoteLogMetadataManager, cluster_id: str, partition: TopicIdPartition) -> PartitionManifest:
    segments = list(metadata.list_remote_log_segments(partition))
    tier_config = dict(metadata.topic_tier_config(partition.topic_id))
    return PartitionManifest(
        cluster_id=cluster_id,
        topic_id_partition=partition,
        # A lower log start of a later leader epoch is recorded only if its leader denies the higher one.
        log_start=max(
            metadata.log_starts(partition), key=lambda start: (start.leader_epoch, start.offset), default=None
        ),
        local_log_start=metadata.local_log_start(partition),
        position=metadata.position(partition),
        gaps=tuple(metadata.gaps(partition)),
        is_diverged=metadata.is_diverged(partition),
        segments=tuple(
            ManifestSegment(
                id=each.segment_id.id,
                start_offset=each.start_offset,
                end_offset=each.end_offset,
                size_bytes=each.segment_size_bytes,
                leader_epochs=each.segment_leader_epochs,
                custom_metadata=each.custom_metadata,
                clamped_to=each.clamped_to,
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


async def check_stored_positions(services: TaskServices, partition: TopicIdPartition) -> None:
    """Does the same for the stored manifest. Costs one GET. A missing or unreadable manifest is no witness.

    For a caller that deletes by the topic's settings, and keeps no manifest itself."""
    manifest = readable_manifest(await read_manifest(services.storage, services.cluster_id, partition))
    if manifest is not None and manifest.topic_id_partition == partition:
        await check_positions(services, manifest)


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
    decide: Callable[[bytes | None], Awaitable[PartitionManifest | None]],
) -> PartitionManifest | None:
    """Replaces the stored manifest by what `decide` makes of it. Returns what was written; None: nothing.

    `decide` gets the stored bytes, and returns None or raises if they must stay. Where conditional writes are proved,
    it decides again if another writer was faster. Raises the store's errors."""
    key = partition_manifest_key(cluster_id, partition)
    for attempt in count(1):
        found = await storage.get_versioned(key)
        manifest = await decide(found.data)
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

    Unfinished copies are too. Does nothing if the deletion of every segment has begun. Raises the store's errors and
    `OwnershipLostError`."""

    async def buried(stored: bytes | None) -> PartitionManifest | None:
        other = readable_manifest(stored)
        if other is not None and other.is_later_than(services.metadata.position(partition)):
            raise RemoteLogMetadataNotReadyError(f"the manifest of {partition} is that of a newer owner")
        services.require_ownership(partition)
        manifest = manifest_of(services.metadata, services.cluster_id, partition)
        left = {each.segment_id.id for each in services.metadata.list_remote_log_segments(partition)}
        dead = tuple(sorted(left.union(manifest.dead)))
        return None if dead == manifest.dead else replace(manifest, segments=(), dead=dead)

    await overwrite_manifest(services.storage, services.cluster_id, partition, buried)


async def delete_manifest(services: TaskServices, partition: TopicIdPartition) -> None:
    """Deletes the manifest of a deleted topic's partition, as the last object of it."""
    await services.storage.delete_object(partition_manifest_key(services.cluster_id, partition))
