"""`PartitionManifestTask`: keeps one partition's manifest, and checks the metadata against it.

The owner rewrites the manifest after every change of its content, and before every trim. If the store fails, the task
raises an alarm and the next round tries again. Until then the owner trims nothing. A restart costs one GET and no PUT.

The manifest is also a witness (DESIGN, safety rule 5). The metadata lost records when the manifest accepts a segment
that the metadata does not know, or names a position that the metadata topic does not reach any more. Then the owner
stops the partition. It does not rewrite the manifest, since `rebuild` needs it.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from tiers.errors import (
    MetadataLostError,
    OwnershipLostError,
    RemoteLogMetadataError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
)
from tiers.manager.copy_attempts import unfinished_segments
from tiers.manager.task_services import TaskServices
from tiers.metadata.partition_manifest import (
    ManifestSegment,
    PartitionManifest,
    decode_partition_manifest,
    encode_partition_manifest,
)
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.storage.object_key import partition_manifest_key

_LOG = logging.getLogger(__name__)
_WAY_BACK = (
    "`tidegate tier rebuild` restores the metadata from the store; `tidegate tier accept` goes on without it"
    " (docs/operations.md, 'A partition stops')"
)


def manifest_of(metadata: RemoteLogMetadataManager, cluster_id: str, partition: TopicIdPartition) -> PartitionManifest:
    segments = list(metadata.list_remote_log_segments(partition))
    return PartitionManifest(
        cluster_id=cluster_id,
        topic_id_partition=partition,
        log_start=next(iter(metadata.log_starts(partition)), None),
        local_log_start=metadata.local_log_start(partition),
        position=metadata.position(partition),
        gaps=tuple(metadata.gaps(partition)),
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
    manifest = manifest_of(services.metadata, services.cluster_id, partition)
    if manifest.segments:
        dead = (*(each.id for each in manifest.segments), *manifest.dead)
        content = encode_partition_manifest(replace(manifest, segments=(), dead=dead))
        await services.storage.put_object(partition_manifest_key(services.cluster_id, partition), content)


async def delete_manifest(services: TaskServices, partition: TopicIdPartition) -> None:
    """Of a deleted topic's partition, of which nothing else is left."""
    await services.storage.delete_object(partition_manifest_key(services.cluster_id, partition))


class PartitionManifestTask:
    """Keeps the manifest of one partition for as long as this process owns it.

    Every ownership has a task of its own, so a task never takes another owner's manifest for its own."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._stored: PartitionManifest | None = None
        """The manifest in the store; None: the store has no manifest that can be read."""
        self._is_unreadable = False
        self._is_checked = False
        self._local_log_start = 0
        """The start of the local log when the task checked the manifest."""
        self._is_failing = False
        self._is_written = False

    @property
    def is_written(self) -> bool:
        """Whether the store's manifest has the metadata as of the last `run`. Only then may the owner trim."""
        return self._is_written

    async def check(self, local_log_start: int) -> None:
        """Checks the metadata against the manifest, once per ownership, before the owner processes the partition.

        Raises `MetadataLostError` when the metadata lost records, and the errors of the store and the brokers."""
        if self._is_checked:
            return
        try:
            self._stored = await self._read()
        except RemoteLogMetadataError as error:
            self._is_unreadable = True
            if self._services.metadata.remote_end_offset(self._partition) is None and not self._is_accepted():
                raise MetadataLostError(f"{self._partition} has no metadata, and {error}: {_WAY_BACK}") from error
            _LOG.error(
                "a partition manifest cannot be read: it is no witness, and is replaced",
                extra={"partition": str(self._partition), "error": str(error)},
            )
        if not (self._stored or self._is_unreadable or self._services.metadata.is_known(self._partition)):
            # The manifest comes before the first record, so metadata without a manifest means a lost manifest.
            await self._put(manifest_of(self._services.metadata, self._services.cluster_id, self._partition))
        if not self._is_accepted():
            if self._stored is not None:
                await self._refuse_to_forget(self._stored)
                await self._check_position(self._stored)
            self._check_leftovers(local_log_start)
        self._local_log_start, self._is_checked = local_log_start, True

    async def check_gap(self) -> None:
        """Asks the manifest and the metadata topic before the owner records a gap.

        Raises `MetadataLostError` unless both agree that no other record was ever copied."""
        if self._stored is None:
            raise MetadataLostError(
                f"records of {self._partition} are in neither tier, and no manifest says whether they were copied:"
                f" {_WAY_BACK}"
            )
        await self._refuse_to_forget(self._stored)
        metadata, timeout_ms = self._services.metadata, self._services.settings.request_timeout_ms
        if not await metadata.confirms(self._partition, self._stored.position, timeout_ms):
            raise MetadataLostError(
                f"records of {self._partition} are in neither tier, and the metadata topic is not the one, or does not"
                f" reach so far, as when its manifest was written: {_WAY_BACK}"
            )

    async def run(self) -> None:
        """Writes the manifest if its content changed. Does not raise the store's errors: see `is_written`."""
        services = self._services
        self._is_written = False
        manifest = manifest_of(services.metadata, services.cluster_id, self._partition)
        if self._stored is None and not (manifest.segments or manifest.dead):
            return  # nothing was ever tiered: there is nothing to rebuild
        if self._stored is None and not self._do_tiers_meet():
            return  # a manifest made of the metadata alone is no witness for that metadata
        if self._says_the_same(manifest):
            self._is_failing, self._is_written = False, True
            return
        try:
            await self._put(manifest)
        except RemoteStorageError as error:
            if not self._is_failing:
                services.metrics.alarms.labels(self._partition.topic, "manifest").inc()
                _LOG.error(
                    "a partition manifest cannot be written: nothing is trimmed, and `rebuild` would miss changes",
                    extra={"partition": str(self._partition), "error": str(error)},
                )
            self._is_failing = True
        else:
            self._is_failing, self._is_written = False, True

    def _do_tiers_meet(self) -> bool:
        """Whether the tiers met when this ownership began, or a recorded gap has the offsets between them."""
        metadata, partition = self._services.metadata, self._partition
        remote_end = metadata.remote_end_offset(partition)
        if remote_end is None or self._local_log_start <= remote_end + 1 or self._is_accepted():
            return True
        return metadata.gap_at(partition, remote_end + 1) is not None

    def _says_the_same(self, manifest: PartitionManifest) -> bool:
        """Whether `manifest` equals the stored one in all but the position.

        The position changes with every record of other partitions."""
        stored = self._stored
        return (
            stored is not None
            and stored.position.topic_id == manifest.position.topic_id
            and replace(stored, position=manifest.position) == manifest
        )

    async def _put(self, manifest: PartitionManifest) -> None:
        services = self._services
        if not services.metadata.owns(self._partition):
            raise OwnershipLostError(f"{self._partition} is owned by another member")
        key = partition_manifest_key(services.cluster_id, self._partition)
        await services.storage.put_object(key, encode_partition_manifest(manifest))
        self._stored = manifest
        services.checkpoint("manifest-written")

    async def _read(self) -> PartitionManifest | None:
        """Reads the manifest; None: the store has none. Raises `RemoteLogMetadataError` for an unreadable one."""
        key = partition_manifest_key(self._services.cluster_id, self._partition)
        try:
            manifest = decode_partition_manifest(await self._services.storage.get_object(key))
        except RemoteResourceNotFoundError:
            return None
        if (manifest.cluster_id, manifest.topic_id_partition) != (self._services.cluster_id, self._partition):
            raise RemoteLogMetadataError("the manifest is of another partition or cluster")
        return manifest

    def _is_accepted(self) -> bool:
        return self._services.metadata.is_accepted(self._partition)

    async def _refuse_to_forget(self, manifest: PartitionManifest) -> None:
        """Raises `MetadataLostError` when the manifest accepts a segment that the metadata does not know as finished,
        and the store still has that segment. One missing object says nothing of the other segments."""
        metadata, partition = self._services.metadata, self._partition
        log_start = metadata.log_start_offset(partition) or 0
        unknown = [
            each for each in manifest.segments if each.end_offset >= log_start and not self._is_known_as_finished(each)
        ]
        for each in sorted(unknown, key=lambda segment: segment.end_offset, reverse=True):
            try:
                await self._services.storage.fetch_indexes(each.metadata(partition))
                break
            except RemoteResourceNotFoundError:
                continue  # the segment was deleted after the manifest was written
        else:
            return
        if not metadata.owns(partition):
            raise OwnershipLostError(f"{partition} is owned by another member, who knows more")
        raise MetadataLostError(
            f"the store has {len(unknown)} accepted segments of {partition} that the metadata does not know:"
            f" it was lost: {_WAY_BACK}"
        )

    def _is_known_as_finished(self, segment: ManifestSegment) -> bool:
        """Whether the metadata knows the segment as finished, or its deletion has begun.

        The deletion may be newer than the manifest."""
        known = self._services.metadata.remote_log_segment_metadata_by_id(
            RemoteLogSegmentId(self._partition, segment.id)
        )
        return known is not None and known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED

    async def _check_position(self, manifest: PartitionManifest) -> None:
        """Raises `MetadataLostError` when the metadata topic does not reach the position of the manifest any more.

        The position of another metadata topic says nothing: `rebuild` made the present topic."""
        metadata, timeout_ms = self._services.metadata, self._services.settings.request_timeout_ms
        if manifest.position.topic_id != metadata.position(self._partition).topic_id:
            return
        if not await metadata.confirms(self._partition, manifest.position, timeout_ms):
            raise MetadataLostError(
                f"the metadata of {self._partition} had {manifest.position.next_offset} records when its manifest was"
                f" written, and lost some of them since: {_WAY_BACK}"
            )

    def _check_leftovers(self, local_log_start: int) -> None:
        """Raises `MetadataLostError` when a copy that looks unfinished may be the only copy of its records.

        The owner deletes unfinished copies next. A finished copy whose last metadata record was lost looks the same.
        Only a readable manifest tells them apart."""
        metadata, partition = self._services.metadata, self._partition
        if self._stored is not None:
            return
        log_start = metadata.log_start_offset(partition) or 0
        for leftover in unfinished_segments(metadata, partition, log_start):
            if (
                leftover.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED
                and leftover.start_offset < local_log_start
                and metadata.remote_log_segment_metadata(partition, leftover.start_offset) is None
            ):
                raise MetadataLostError(
                    f"{partition}: the broker has removed records of segment {leftover.segment_id.id}, whose copy did"
                    f" not end, and no manifest says whether it did: {_WAY_BACK}"
                )
