"""`PartitionManifestTask`: keeps one partition's manifest, and checks the metadata against it.

The owner rewrites the manifest after every change of its content, and before every trim. If the store fails, the task
raises an alarm and the next round tries again. Until then the owner trims nothing. A restart costs one GET and no PUT.
A trim costs one GET, since a former owner's late PUT may have replaced the manifest.

The manifest is also a witness (docs/design.md, safety rule 5). The metadata lost records when the manifest accepts a
segment that the metadata does not know, or names a position that the metadata topic does not reach any more. Then the
owner stops the partition. It does not rewrite the manifest, since `rebuild` needs it.

An operator may accept what the metadata knows. The acceptance names the manifest that the store had then, and the
leader's log if it had another history than the copied records. It counts only while both are the same
(`AcceptedState`). The owner writes another manifest before it ends an acceptance. So an acceptance has no effect if it
comes back because the metadata topic lost the record of its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from tiers.errors import (
    MetadataLostError,
    OwnershipLostError,
    RemoteLogMetadataError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
)
from tiers.metadata.partition_manifest import (
    ManifestSegment,
    PartitionManifest,
    decode_partition_manifest,
    encode_partition_manifest,
    witness_of,
)
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.storage.object_key import partition_manifest_key
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.copy.copy_attempts import unfinished_segments
from tiers.tasks.stop_check import AcceptedLog, AcceptedState, state_to_accept
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)
_NOT_ACCEPTED = -2
"""No clamp has this offset."""
_WAY_BACK = (
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
        dead=tuple(
            sorted(
                each.segment_id.id for each in segments if each.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED
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

    A position in another metadata topic does not count: `rebuild` made the present topic."""
    timeout_ms = services.settings.request_timeout_ms
    for partition, position in manifest.positions():
        if position.topic_id != services.metadata.position(partition).topic_id:
            continue
        if not await services.metadata.confirms(partition, position, timeout_ms):
            raise MetadataLostError(
                f"the metadata of {partition} reached offset {position.next_offset} when the manifest of"
                f" {manifest.topic_id_partition} was written, and lost records since: {_WAY_BACK}"
            )


async def check_stored_positions(services: TaskServices, partition: TopicIdPartition) -> None:
    """Does the same for the stored manifest. Costs one GET. A missing or unreadable manifest is no witness.

    For a caller that deletes by the topic's settings, and keeps no manifest itself."""
    stored = await read_manifest(services.storage, services.cluster_id, partition)
    try:
        manifest = None if stored is None else decode_partition_manifest(stored)
    except RemoteLogMetadataError:
        return
    if manifest is not None and manifest.topic_id_partition == partition:
        await check_positions(services, manifest)


async def bury_manifest(services: TaskServices, partition: TopicIdPartition) -> None:
    """Rewrites the manifest of a partition whose whole remote log is about to be deleted, so that it accepts no
    segment.

    Does nothing if no segment is left. Raises the store's errors and `OwnershipLostError`."""
    manifest = manifest_of(services.metadata, services.cluster_id, partition)
    if manifest.segments:
        dead = (*(each.id for each in manifest.segments), *manifest.dead)
        content = encode_partition_manifest(replace(manifest, segments=(), dead=dead))
        services.require_ownership(partition)
        await services.storage.put_object(partition_manifest_key(services.cluster_id, partition), content)


async def delete_manifest(services: TaskServices, partition: TopicIdPartition) -> None:
    """Deletes the manifest of a deleted topic's partition, as the last object of it."""
    await services.storage.delete_object(partition_manifest_key(services.cluster_id, partition))


class PartitionManifestTask:
    """Keeps the manifest of one partition for as long as this process owns it.

    Every ownership has a task of its own, so a task never takes another owner's manifest for its own."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._stored: PartitionManifest | None = None
        """The manifest that this owner found in the store or wrote; None: it found no readable one."""
        self._stored_witness = witness_of(None)
        self._segments: dict[UUID, int | None] = {}
        """Where a clamp cuts each segment that the stored manifest accepts; None: nowhere."""
        self._is_unreadable = False
        self._accepted: AcceptedState | None = None
        self._is_written_since_accepted = False
        self._is_checked = False
        self._local_log_start = 0
        """The start of the local log when the task checked the manifest."""
        self._is_written = False
        self._lock = asyncio.Lock()
        """Held by what reads or writes the object: the copy of one round and the trim of another run side by side."""
        self.error: RemoteStorageError | None = None
        """The store's error of the last write; None: it succeeded."""
        self._read_error: RemoteStorageError | None = None

    def has_accepted(self, segment: RemoteLogSegmentMetadata) -> bool:
        """Whether the manifest that this owner found or wrote last accepts the segment, with the same end."""
        return self._segments.get(segment.segment_id.id, _NOT_ACCEPTED) == segment.clamped_to

    @property
    def is_written(self) -> bool:
        """Whether this owner wrote the metadata as of the last `run` into the manifest."""
        return self._is_written

    @property
    def is_accepted(self) -> bool:
        """Whether an operator accepts the known records as all that is left. `check` has judged that for this round."""
        return self._accepted is not None

    def accepts(self, log: AcceptedLog) -> bool:
        """Whether an operator accepts this log of a leader, which has another history than the copied records."""
        return self._accepted is not None and self._accepted.log == log

    async def check(self, bounds: LocalLogBounds | None, log_start: int | None = None) -> None:
        """Checks the metadata against the manifest, once per ownership, before the owner processes the partition.

        `bounds` are the leader's, and `log_start` is the recorded one that the leader confirms. In every round the
        method judges the operator's acceptance, if there is one. `bounds` None: the caller does not process the
        partition's log, and an acceptance does not count for it. Raises `MetadataLostError` when the metadata lost
        records, and the errors of the store and the brokers."""
        async with self._lock:
            if bounds is not None:
                await self._judge_acceptance(bounds, log_start)
            if not self._is_checked:
                await self._check(0 if bounds is None else bounds.log_start_offset)

    async def _check(self, local_log_start: int) -> None:
        try:
            stored = await self._fetch()
            self._keep(self._decoded(stored), witness_of(stored))
        except RemoteLogMetadataError as error:
            self._is_unreadable = True
            if self._services.metadata.remote_end_offset(self._partition) is None and not self.is_accepted:
                raise MetadataLostError(f"{self._partition} has no metadata, and {error}: {_WAY_BACK}") from error
            logger.error(
                "a partition manifest cannot be read: it does not count as a witness, and is replaced",
                extra={"partition": str(self._partition), "error": str(error)},
            )
        if not (self._stored or self._is_unreadable or self._services.metadata.is_known(self._partition)):
            # The manifest is written before the first record. So metadata without a manifest means a lost manifest.
            await self._put(manifest_of(self._services.metadata, self._services.cluster_id, self._partition))
        if self.is_accepted:
            await self._keep_leftovers(local_log_start)
        elif self._stored is not None:
            await self._refuse_to_forget(self._stored)
            await check_positions(self._services, self._stored)
        else:
            self._check_leftovers(local_log_start)
        self._local_log_start, self._is_checked = local_log_start, True

    async def check_gap(self) -> None:
        """Asks the manifest and the metadata topic before the owner records a gap. Costs one GET.

        Raises `MetadataLostError` unless both agree that no other record was ever copied, and the store's errors."""
        async with self._lock:
            await self._restore()
        if self._stored is None:
            raise MetadataLostError(
                f"records of {self._partition} are in neither tier, and no manifest says whether they were copied:"
                f" {_WAY_BACK}"
            )
        await self._refuse_to_forget(self._stored)
        metadata, timeout_ms = self._services.metadata, self._services.settings.request_timeout_ms
        if not await metadata.confirms(self._partition, self._stored.position, timeout_ms):
            raise MetadataLostError(
                f"records of {self._partition} are in neither tier, and the metadata topic is another one than when the"
                f" manifest was written, or lost records since: {_WAY_BACK}"
            )

    async def confirm(self) -> bool:
        """Reads the manifest back, right before a trim. Returns whether the store has what this owner wrote last.

        Costs one GET. Does not raise the store's errors."""
        async with self._lock:
            try:
                await self._restore()
            except RemoteStorageError as error:
                self._alarm(error)
                self._read_error = error
                return False
            self._read_error = None
        return True

    async def end_acceptance(self) -> None:
        """Ends the acceptance after the round that continued because of it. Raises the store's errors."""
        if not self.is_accepted:
            return
        services, partition = self._services, self._partition
        async with self._lock:
            if not self._is_written_since_accepted:
                # Its position, at least, differs from that of the manifest that the operator accepted.
                await self._put(manifest_of(services.metadata, services.cluster_id, partition))
        await services.metadata.end_acceptance(partition)
        self._accepted = None

    async def run(self) -> bool:
        """Writes the manifest if its content changed. Returns whether the store has the present metadata.

        Does not raise the store's errors: see `error`."""
        async with self._lock:
            await self._run()
            return self._is_written

    async def _run(self) -> None:
        services = self._services
        self._is_written = False
        manifest = manifest_of(services.metadata, services.cluster_id, self._partition)
        if self._stored is None and not (manifest.segments or manifest.dead):
            return  # no segment was ever copied, so there is nothing to rebuild
        if self._stored is None and not self._do_tiers_meet():
            return  # a manifest that is made from the metadata alone is no witness for that metadata
        if self._says_the_same(manifest):
            self.error, self._is_written = None, True
            return
        try:
            await self._put(manifest)
        except RemoteStorageError as error:
            self._alarm(error)
            self.error = error
        else:
            self.error, self._is_written = None, True

    def _alarm(self, error: RemoteStorageError) -> None:
        """Raises an alarm, once until the store accepts or returns the manifest again."""
        if self.error is None and self._read_error is None:
            self._services.metrics.alarms.labels(self._partition.topic, "manifest").inc()
            logger.error(
                "a partition manifest cannot be written or read: no newer segment is trimmed, and `rebuild` would miss"
                " changes",
                extra={"partition": str(self._partition), "error": str(error)},
            )

    def _do_tiers_meet(self) -> bool:
        """Whether the tiers met when this ownership began, or a recorded gap has the offsets between them."""
        metadata, partition = self._services.metadata, self._partition
        remote_end = metadata.remote_end_offset(partition)
        if remote_end is None or self._local_log_start <= remote_end + 1 or self.is_accepted:
            return True
        return metadata.gap_at(partition, remote_end + 1) is not None

    def _says_the_same(self, manifest: PartitionManifest) -> bool:
        """Whether `manifest` equals the stored one except for the positions.

        They change with every record of other partitions."""
        stored = self._stored
        return (
            stored is not None
            and stored.position.topic_id == manifest.position.topic_id
            and replace(stored, position=manifest.position, settings_position=manifest.settings_position) == manifest
        )

    def _keep(self, stored: PartitionManifest | None, witness: str) -> None:
        self._stored, self._stored_witness = stored, witness
        self._segments = {} if stored is None else {each.id: each.clamped_to for each in stored.segments}

    async def _put(self, manifest: PartitionManifest) -> None:
        services, content = self._services, encode_partition_manifest(manifest)
        services.require_ownership(self._partition)
        await services.storage.put_object(partition_manifest_key(services.cluster_id, self._partition), content)
        self._keep(manifest, witness_of(content))
        self._is_written_since_accepted = True
        services.checkpoint("manifest-written")

    async def _restore(self) -> None:
        """Writes this owner's manifest again if the store has another content in its place.

        A former owner may be stopped in the middle of a PUT, which takes effect long after the present owner's PUTs.
        Raises `MetadataLostError` if that content is a witness of segments that the metadata does not know."""
        if self._stored is None:
            return
        found = await self._fetch()
        if witness_of(found) == self._stored_witness:
            return
        try:
            other = self._decoded(found)
        except RemoteLogMetadataError:  # unreadable content is no witness
            other = None
        if other is not None:
            await self._refuse_to_forget(other)
        await self._put(self._stored)
        logger.warning(
            "the store had another partition manifest than its owner wrote: the owner writes it again",
            extra={"partition": str(self._partition)},
        )

    async def _fetch(self) -> bytes | None:
        return await read_manifest(self._services.storage, self._services.cluster_id, self._partition)

    def _decoded(self, stored: bytes | None) -> PartitionManifest | None:
        """Decodes a stored manifest. Raises `RemoteLogMetadataError` when it is unreadable or of another partition."""
        if stored is None:
            return None
        manifest = decode_partition_manifest(stored)
        if (manifest.cluster_id, manifest.topic_id_partition) != (self._services.cluster_id, self._partition):
            raise RemoteLogMetadataError("the manifest belongs to another partition or cluster")
        return manifest

    async def _judge_acceptance(self, bounds: LocalLogBounds, log_start: int | None) -> None:
        """Decides whether the recorded acceptance counts, and ends it if the operator saw another state.

        Costs one GET and requests to the leader while an acceptance is recorded."""
        self._accepted, self._is_written_since_accepted = None, False
        services, partition = self._services, self._partition
        witness = services.metadata.acceptance(partition)
        if witness is None:
            return
        accepted, stored = AcceptedState.of_witness(witness), await self._fetch()
        timeout_ms = services.settings.request_timeout_ms
        found = await state_to_accept(
            services.source, services.metadata, partition, bounds, log_start, stored, timeout_ms
        )
        if accepted.covers(found, bounds.leader_epoch):
            self._accepted = accepted
            return
        await services.metadata.end_acceptance(partition)
        logger.warning(
            "an operator accepted another state than the owner finds: the acceptance ends without effect; check what"
            " is missing, and accept again",
            extra={"partition": str(partition), "accepted": accepted.witness, "found": found.witness},
        )

    async def _refuse_to_forget(self, manifest: PartitionManifest) -> None:
        """Raises `MetadataLostError` when the metadata does not know a segment that the manifest accepts.

        It raises only if the store still has one of these segments, and no log start covers it. One missing object does
        not show that the other segments are gone too."""
        metadata, partition = self._services.metadata, self._partition
        log_starts = metadata.log_starts(partition)
        unknown = [
            each
            for each in manifest.segments
            if not (self._is_known_as_finished(each) or any(_deletes(start, each) for start in log_starts))
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
            raise OwnershipLostError(f"{partition} is owned by another member, which has newer metadata")
        raise MetadataLostError(
            f"the store has {len(unknown)} accepted segments of {partition} that the metadata does not know: metadata"
            f" was lost: {_WAY_BACK}"
        )

    def _is_known_as_finished(self, segment: ManifestSegment) -> bool:
        """Whether the metadata knows the segment as finished, or its deletion has begun.

        The deletion may be newer than the manifest."""
        known = self._services.metadata.remote_log_segment_metadata_by_id(
            RemoteLogSegmentId(self._partition, segment.id)
        )
        return known is not None and known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED

    def _check_leftovers(self, local_log_start: int) -> None:
        """Raises `MetadataLostError` when a copy that looks unfinished may be the only copy of its records.

        The owner deletes unfinished copies next. A finished copy whose last metadata record was lost looks the same.
        Only a readable manifest tells them apart."""
        for leftover in self._last_copies(local_log_start):
            raise MetadataLostError(
                f"{self._partition}: the broker has removed records of segment {leftover.segment_id.id}. By the"
                f" metadata, its copy did not finish, but no manifest confirms that: {_WAY_BACK}"
            )

    async def _keep_leftovers(self, local_log_start: int) -> None:
        """Forgets the copies that look unfinished and may be the only copy of their records, and keeps their objects.

        An acceptance deletes nothing. The owner deletes the objects of every unfinished copy that the metadata knows.
        `orphans` lists the objects that the metadata does not know."""
        kept = self._last_copies(local_log_start)
        if not kept:
            return
        self._services.require_ownership(self._partition)
        await self._services.metadata.forget_unfinished_copies([one.segment_id for one in kept])
        logger.warning(
            "copies that look unfinished may be the only ones of their records: their objects stay in the store",
            extra={"partition": str(self._partition), "segments": [str(one.segment_id.id) for one in kept]},
        )

    def _last_copies(self, local_log_start: int) -> list[RemoteLogSegmentMetadata]:
        """Returns the copies without an end that have a record of neither the local log nor a readable segment.

        Records that a user or the topic's retention deleted do not count."""
        metadata, partition = self._services.metadata, self._partition
        found = []
        for leftover in unfinished_segments(metadata, partition, metadata.log_start_offset(partition) or 0):
            deleted_to = [
                start.offset
                for start in metadata.log_starts(partition)
                if start.reason is not LogStartReason.SEEN
                and _is_of_the_same_history(start, leftover.segment_leader_epochs)
            ]
            offset = max([leftover.start_offset, *deleted_to])
            while (readable := metadata.remote_log_segment_metadata(partition, offset)) is not None:
                offset = readable.valid_end_offset + 1
            is_copy = leftover.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED
            if is_copy and offset <= leftover.end_offset and offset < local_log_start:
                found.append(leftover)
        return found


def _deletes(start: LogStart, segment: ManifestSegment) -> bool:
    """Whether the whole segment lies below the log start. A segment of a later leader epoch has another history."""
    return segment.end_offset < start.offset and _is_of_the_same_history(start, segment.leader_epochs)


def _is_of_the_same_history(start: LogStart, leader_epochs: Sequence[LeaderEpochEntry]) -> bool:
    return leader_epochs[-1].epoch <= start.leader_epoch
