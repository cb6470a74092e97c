"""`PartitionManifestTask`: rewrites one partition's manifest after a round that changed what it says.

It is the last step of a round, when no copy of the partition is under way: whatever is not finished by then never will
be. A store that fails is an alarm and holds up nothing; the next round tries again. What is written already is read
once per ownership, so that a restart costs a GET and no PUT.

A manifest may know more than the metadata: then the metadata was lost, and the manifest is what `rebuild` needs. It is
left as it is, and a partition of which no metadata is left is not copied anew beside its own segments.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from tiers.errors import (
    LogDivergedError,
    OwnershipLostError,
    RemoteLogMetadataError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
)
from tiers.manager.task_services import TaskServices
from tiers.metadata.partition_manifest import (
    ManifestSegment,
    PartitionManifest,
    decode_partition_manifest,
    encode_partition_manifest,
)
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.storage.object_key import partition_manifest_key

_LOG = logging.getLogger(__name__)


def manifest_of(metadata: RemoteLogMetadataReader, cluster_id: str, partition: TopicIdPartition) -> PartitionManifest:
    segments = list(metadata.list_remote_log_segments(partition))
    return PartitionManifest(
        cluster_id=cluster_id,
        topic_id_partition=partition,
        log_start_offset=metadata.recorded_log_start_offset(partition),
        local_log_start_offset=metadata.local_log_start_offset(partition),
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
        dead=tuple(
            each.segment_id.id for each in segments if each.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        ),
        tier_config=dict(metadata.topic_tier_config(partition.topic_id)),
    )


async def bury_manifest(services: TaskServices, partition: TopicIdPartition) -> None:
    """Of a partition whose whole remote log goes: rewrites it, if segments are left, so that it accepts none. Raises
    what the store raises."""
    if not services.cluster_id:
        return
    manifest = manifest_of(services.metadata, services.cluster_id, partition)
    if manifest.segments:
        dead = (*(each.id for each in manifest.segments), *manifest.dead)
        content = encode_partition_manifest(replace(manifest, segments=(), dead=dead))
        await services.storage.put_object(partition_manifest_key(services.cluster_id, partition), content)


async def delete_manifest(services: TaskServices, partition: TopicIdPartition) -> None:
    """Of a deleted topic's partition, of which nothing else is left."""
    if services.cluster_id:
        await services.storage.delete_object(partition_manifest_key(services.cluster_id, partition))


class PartitionManifestTask:
    """Lives as long as the ownership: somebody else's manifest is never taken for this one's."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._written: int | None = None
        """The hash of what the store has."""
        self._wanted: int | None = None
        """Of what the last `run` found that it should have."""
        self._failing = False
        self._checked = False

    @property
    def is_failing(self) -> bool:
        """Whether the last `run` did not write what it had to: the store failed, or it was not the owner's."""
        return self._wanted != self._written

    async def check(self) -> None:
        """Before a copy. Raises `LogDivergedError` when the partition's metadata was lost; what the store raises."""
        services = self._services
        if self._checked or not services.cluster_id or services.metadata.remote_end_offset(self._partition) is not None:
            return
        data = await self._stored()
        if data is not None:
            try:
                manifest = decode_partition_manifest(data)
            except RemoteLogMetadataError as error:
                raise LogDivergedError(f"{self._partition} has no metadata, and {error}") from error
            await self._refuse_to_forget(manifest)
        self._checked = True

    async def run(self) -> None:
        """Never raises what the store raises."""
        services = self._services
        if not services.cluster_id:
            return
        manifest = manifest_of(services.metadata, services.cluster_id, self._partition)
        known = hash((manifest.log_start_offset, manifest.local_log_start_offset, manifest.segments, manifest.dead))
        known ^= hash(tuple(sorted(manifest.tier_config.items())))
        if self._written is None and not manifest.segments and not manifest.dead:
            return  # nothing was ever tiered: there is nothing to rebuild
        self._wanted = known
        if known == self._written:
            return
        key = partition_manifest_key(services.cluster_id, self._partition)
        try:
            await self._put(key, encode_partition_manifest(manifest), known)
        except (RemoteStorageError, LogDivergedError) as error:
            if not self._failing:
                services.metrics.alarms.labels(self._partition.topic, "manifest").inc()
                _LOG.error(
                    "a partition manifest cannot be written: `rebuild` would not know what happened since",
                    extra={"partition": str(self._partition), "error": str(error)},
                )
            self._failing = True
        else:
            self._failing = False

    async def _put(self, key: str, content: bytes, known: int) -> None:
        if self._written is None:
            stored = await self._stored()
            if stored == content:
                self._written = known
                return
            if stored is not None:
                # One that cannot be read tells `rebuild` nothing either.
                with suppress(RemoteLogMetadataError):
                    await self._refuse_to_forget(decode_partition_manifest(stored))
        if self._services.metadata.owns(self._partition):
            await self._services.storage.put_object(key, content)
            self._written = known
            self._services.checkpoint("manifest-written")

    async def _stored(self) -> bytes | None:
        try:
            key = partition_manifest_key(self._services.cluster_id, self._partition)
            return await self._services.storage.get_object(key)
        except RemoteResourceNotFoundError:
            return None

    async def _refuse_to_forget(self, manifest: PartitionManifest) -> None:
        """Raises `LogDivergedError` when it accepts what the metadata does not know, and the store still has."""
        metadata, partition = self._services.metadata, self._partition
        log_start = metadata.log_start_offset(partition) or 0
        unknown = [
            each
            for each in manifest.segments
            if each.end_offset >= log_start
            and metadata.remote_log_segment_metadata_by_id(RemoteLogSegmentId(partition, each.id)) is None
        ]
        if not unknown:
            return
        newest = max(unknown, key=lambda each: each.end_offset)
        try:
            await self._services.storage.fetch_indexes(newest.metadata(partition))
        except RemoteResourceNotFoundError:
            return  # deleted as it should be: the manifest is an old one
        if not metadata.owns(partition):
            raise OwnershipLostError(f"{partition} is owned by another member, who knows more")
        raise LogDivergedError(
            f"the store has {len(unknown)} accepted segments of {partition} that the metadata does not know:"
            " it was lost, and `tidegate tier rebuild` restores it"
        )
