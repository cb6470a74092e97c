"""`PartitionManifestTask`: keeps one partition's manifest, and checks the metadata against it.

The owner rewrites the manifest after every change of its content. If the store fails, the task raises an alarm and the
next round tries again. Until then the owner trims only what the stored manifest accepts. A restart costs no PUT.

A former owner's PUT may be late and replace the manifest. So the owner reads the stored one before each rewrite, before
each trim and each deletion of copied segments, and once more T_vis after a takeover. It reads it before a copy counts,
too: a store that lacks the manifest may be another place by now, for example a folder whose file system is not mounted.
A manifest says which metadata offset it reflects. If the stored one reflects a later offset than the owner has read,
there is a newer owner, or metadata was lost: the owner does not overwrite it, and finds out. Where conditional writes
are proved, a rewrite names the version that was read, so that no write in between is lost.

The owner compares the metadata with the manifest (docs/design.md, safety rule 5). The metadata lost records when the
manifest accepts a segment that the metadata does not know, or names a position that the metadata topic does not reach
any more. Then the owner doubts the past. It does not rewrite the manifest, since `rebuild` needs it.

An operator may accept what the metadata knows. The acceptance names the manifest that the store had then, and counts
only while the store has it. The owner writes another manifest before it ends an acceptance. So an acceptance has no
effect if it comes back because the metadata topic lost the record of its end.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from uuid import UUID

from tiers.errors import (
    LaterFormatError,
    MetadataLostError,
    RemoteLogMetadataError,
    RemoteLogMetadataNotReadyError,
    RemoteStorageError,
)
from tiers.metadata.partition_manifest import (
    PartitionManifest,
    decode_partition_manifest,
    encode_partition_manifest,
    witness_of,
)
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.remote_storage_manager import VersionedObject
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.history.store_place import has_segment_of
from tiers.tasks.history.stored_manifest import (
    WAY_BACK,
    check_positions,
    manifest_of,
    overwrite_manifest,
    read_manifest,
    refuse_to_forget,
)
from tiers.tasks.history.unknown_segments import unknown_segments
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)
_NOT_ACCEPTED = -2
"""No CUT has this offset."""


class PartitionManifestTask:
    """Keeps the manifest of one partition for as long as this process owns it.

    Every ownership has a task of its own, so a task never takes another owner's manifest for its own."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._stored: PartitionManifest | None = None
        """The manifest that this owner found in the store or wrote; None: it found no readable one."""
        self._stored_witness = witness_of(None)
        self._unanswered: set[str] = set()
        """The witnesses of the writes over a version that the store has not answered. They may have taken effect."""
        self._segments: dict[UUID, int | None] = {}
        """The `cut_at` of each segment that the stored manifest accepts."""
        self._is_unreadable = False
        self._knew_no_copy: bool | None = None
        """Whether the metadata knew no copy when this owner found an unreadable manifest. Copying goes on."""
        self._is_accepted = False
        self._is_written_since_accepted = False
        self._is_checked = False
        self._is_written = False
        self._read_again_at_ms: int | None = None
        """When the task reads the manifest once more after the takeover; None: it did."""
        self._lock = asyncio.Lock()
        """Held by what reads or writes the object: the copy of one round and the trim of another run side by side."""
        self.error: RemoteStorageError | None = None
        """The store's error of the last write; None: it succeeded."""
        self._read_error: RemoteStorageError | None = None
        """The store's error of the last `confirm`; None: it succeeded, or the manifest was read since."""

    def has_accepted(self, segment: RemoteLogSegmentMetadata) -> bool:
        """Whether the manifest that this owner found or wrote last accepts the segment, with the same end."""
        return self._segments.get(segment.segment_id.id, _NOT_ACCEPTED) == segment.cut_at

    @property
    def is_written(self) -> bool:
        """Whether this owner wrote the metadata as of the last `run` into the manifest."""
        return self._is_written

    @property
    def is_accepted(self) -> bool:
        """Whether an operator accepts the known records as all that is left. `check` has judged that for this round."""
        return self._is_accepted

    async def check(self, *, is_judging: bool = True) -> None:
        """Checks the metadata against the manifest, once per ownership, before the owner processes the partition.

        In every round the method judges the operator's acceptance, if there is one. For a caller that does not process
        the partition's log, no acceptance counts: it passes `is_judging` False. Raises `MetadataLostError` when the
        metadata lost records, and the errors of the store and the brokers."""
        if is_judging and self._is_checked and self._services.metadata.acceptance(self._partition) is None:
            # Nothing here asks the store, so a store that hangs in the middle of a write must not hold up the round.
            self._is_accepted = False
            return
        async with self._lock:
            if is_judging:
                await self._judge_acceptance()
            if not self._is_checked:
                await self._check()

    async def _check(self) -> None:
        try:
            stored = await self._fetch()
            found = self._decoded(stored)
            if self._stored is not None and not self._is_own(stored) and not self.is_accepted:
                await self._check_place()  # before this owner forgets the manifest that it found or wrote
            self._keep(found, witness_of(stored))
        except RemoteLogMetadataError as error:
            self._is_unreadable = True
            if self._knew_no_copy is None:
                self._knew_no_copy = self._services.metadata.remote_end_offset(self._partition) is None
            if self._knew_no_copy and not self.is_accepted:
                raise MetadataLostError(f"{self._partition} has no metadata, and {error}: {WAY_BACK}") from error
            logger.error(
                "a partition manifest cannot be read: it does not count as a witness, and is replaced",
                extra={"partition": str(self._partition), "error": str(error)},
            )
        if not (self._stored or self._is_unreadable or self._has_an_owner_copied()):
            # The manifest is written before the first copy. So a copy without a manifest means a lost manifest.
            await self._put()
        if not self.is_accepted:
            if self._stored is None:
                if not self._is_unreadable:
                    await self._check_place()
            else:
                await refuse_to_forget(self._services, self._partition, self._stored)
                await check_positions(self._services, self._stored)
        self._is_checked = True
        self._read_again_at_ms = self._services.clock_ms() + self._services.settings.remote_log.visible_after_ms

    def _has_an_owner_copied(self) -> bool:
        """Whether the metadata has a record of a copy, or one that an owner writes only after a copy.

        Any proxy records the log start of a user, also while the store refuses the first manifest."""
        metadata, partition = self._services.metadata, self._partition
        known = manifest_of(metadata, self._services.cluster_id, partition)
        is_retention = any(start.reason is LogStartReason.RETENTION for start in metadata.log_starts(partition))
        is_trimmed = known.local_log_start is not None
        return bool(known.segments or known.dead or known.gaps or known.cuts or is_trimmed or is_retention)

    async def check_gap(self, gap: LogGap) -> None:
        """Asks the manifest, if there is one, the metadata topic and the store before the owner records `gap`.

        Costs one GET, and one LIST per 1000 objects of the partition. Raises `MetadataLostError` unless all agree that
        no record of the gap was ever copied, and the store's errors."""
        await self.require_stored()
        metadata, timeout_ms = self._services.metadata, self._services.settings.request_timeout_ms
        if self._stored is not None:
            await refuse_to_forget(self._services, self._partition, self._stored)
            if not await metadata.confirms(self._partition, self._stored.position, timeout_ms):
                raise MetadataLostError(
                    f"records of {self._partition} are in neither tier, and the metadata topic is another one than when"
                    f" the manifest was written, or lost records since: {WAY_BACK}"
                )
        dead = () if self._stored is None else self._stored.dead
        async for segment in unknown_segments(self._services, self._partition, dead, gap):
            raise MetadataLostError(
                f"records of {self._partition} are in neither tier by the metadata, but the store has them in segment"
                f" {segment.segment_id.id}: metadata was lost: {WAY_BACK}"
            )

    async def has_unknown(self, head: LogGap) -> bool:
        """Returns whether only the store knows a whole segment with records of `head`.

        Costs one GET, and one LIST per 1000 objects of the partition. Raises `MetadataLostError`, and the store's
        errors."""
        await self.require_stored()  # otherwise the listing is that of another place
        dead = () if self._stored is None else self._stored.dead
        async for _ in unknown_segments(self._services, self._partition, dead, head):
            return True
        return False

    async def announce_unknown(self, hole: LogGap) -> tuple[list[RemoteLogSegmentMetadata], MetadataLostError | None]:
        """Announces the whole segments with records of `hole` that only the store knows, as attempts.

        An operator has accepted that the metadata lost them. The owner reads them back, and finishes those that fit.
        The CUTs of the stored manifest are recorded first. Returns the announced segments, and an error that names a
        segment which only `rebuild` can restore. Raises the store's errors."""
        services, partition = self._services, self._partition
        dead = () if self._stored is None else self._stored.dead
        found = [each async for each in unknown_segments(services, partition, dead, hole)]
        announced: list[RemoteLogSegmentMetadata] = []
        not_restored: MetadataLostError | None = None
        known_cuts = {(each.leader_epoch, each.offset) for each in services.metadata.cuts(partition)}
        for cut in () if self._stored is None or not found else self._stored.cuts:
            if (cut.leader_epoch, cut.offset) not in known_cuts:
                services.require_ownership(partition)
                await services.metadata.put_cut(partition, cut.leader_epoch, cut.offset, is_proved=cut.is_proved)
        for each in sorted(found, key=lambda each: each.start_offset):
            try:
                decoded = decode_indexes_object(await services.storage.fetch_indexes(each), each).metadata
            except LaterFormatError as error:
                not_restored = MetadataLostError(
                    f"the metadata of {partition} has lost segment {each.segment_id.id}, and an acceptance cannot"
                    f" restore it: {error}: {WAY_BACK}"
                )
                continue
            services.require_ownership(partition)
            await services.metadata.add_remote_log_segment_metadata(decoded)
            known = services.metadata.remote_log_segment_metadata_by_id(each.segment_id)
            announced.append(decoded if known is None else known)
            logger.warning(
                "the metadata had lost a segment that the store has: it is read back",
                extra={"partition": str(partition), "segment": str(each.segment_id.id)},
            )
        return announced, not_restored

    async def confirm(self) -> bool:
        """Reads the manifest back, right before a trim or a deletion.

        Returns whether the store has what this owner wrote last. A cluster that was copied and uses the same place has
        written another one. Raises `MetadataLostError` if that accepts segments that the metadata does not know.

        Costs one GET. Does not raise the store's errors."""
        async with self._lock:
            try:
                await self._restore()
            except RemoteStorageError as error:
                self._alarm(error)
                self._read_error = error
                return False
            self._read_error = None
            self._end_alarm()
        return True

    async def require_stored(self) -> None:
        """Does the same as `confirm` right before a copy counts. Raises the store's errors.

        The file system of the store may be unmounted at any time. The copy is then in the folder below. If this owner
        knows no manifest, a copied segment must show that the store is still the right place."""
        async with self._lock:
            if self._stored is None and not self.is_accepted:
                await self._check_place()
            else:
                await self._restore()

    async def end_acceptance(self, *, is_settled: bool = True) -> None:
        """Ends the acceptance after the round that continued because of it. Raises the store's errors.

        If a doubt remains, it writes no manifest: the present one has what the metadata lacks."""
        if not self.is_accepted:
            return
        services, partition = self._services, self._partition
        async with self._lock:
            if is_settled and not self._is_written_since_accepted:
                # Its position, at least, differs from that of the manifest that the operator accepted.
                await self._put()
        await services.metadata.end_acceptance(partition)
        self._is_accepted = False

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
        is_due = self._read_again_at_ms is not None and services.clock_ms() >= self._read_again_at_ms
        try:
            if not self._says_the_same(manifest):
                await self._put()
            elif is_due or self._read_error is not None:
                await self._restore()
            if is_due:
                self._read_again_at_ms = None
            self._read_error = None
        except RemoteStorageError as error:
            self._alarm(error)
            self.error = error
        else:
            self.error, self._is_written = None, True
            self._end_alarm()

    def _alarm(self, error: RemoteStorageError) -> None:
        """Raises an alarm, once until the store accepts or returns the manifest again."""
        if self.error is None and self._read_error is None:
            fields = {"partition": str(self._partition), "error": str(error)}
            self._services.metrics.alarms.begin(self._partition.topic, AlarmReason.MANIFEST, *fields.values())
            logger.error(
                "a partition manifest cannot be written or read: no newer segment is trimmed, and `rebuild` would miss"
                " changes",
                extra=fields,
            )

    def _end_alarm(self) -> None:
        if self.error is None and self._read_error is None:
            self._services.metrics.alarms.end(self._partition.topic, AlarmReason.MANIFEST, str(self._partition))

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
        self._unanswered.clear()
        self._segments = {} if stored is None else stored.accepted()

    def _is_own(self, stored: bytes | None) -> bool:
        """Whether the store has what this owner found or wrote last.

        A write over a version takes effect only at the place that had this version. So it shows the place, even if the
        store has not answered it."""
        witness = witness_of(stored)
        return witness == self._stored_witness or witness in self._unanswered

    async def _put(self) -> None:
        """Writes what the metadata says now. Raises the store's errors, and those of `_judge`."""
        services, partition = self._services, self._partition

        async def present(stored: VersionedObject) -> PartitionManifest:
            await self._judge(stored.data)
            services.require_ownership(partition)
            manifest = manifest_of(services.metadata, services.cluster_id, partition)
            if stored.version:  # there is an object, and a version
                self._unanswered.add(witness_of(encode_partition_manifest(manifest)))
            return manifest

        try:
            written = await overwrite_manifest(services.storage, services.cluster_id, partition, present)
        except MetadataLostError:
            self._is_checked = False  # the doubt stays: each round checks the store first
            raise
        assert written is not None
        self._keep(written, witness_of(encode_partition_manifest(written)))
        self._is_written_since_accepted = True
        services.checkpoint("manifest-written")

    async def _restore(self) -> None:
        """Writes this owner's manifest again if the store has another content in its place.

        A former owner may be stopped in the middle of a PUT, which takes effect long after the present owner's PUTs."""
        if self._stored is None or witness_of(await self._fetch()) == self._stored_witness:
            return
        await self._put()
        logger.warning(
            "the store had another partition manifest than its owner wrote: the owner writes it again",
            extra={"partition": str(self._partition)},
        )

    async def _judge(self, stored: bytes | None) -> None:
        """Decides whether this owner may replace `stored`, which may be another manifest than it found or wrote last.

        Raises `MetadataLostError` if it is a witness of records that the metadata lost, and `OwnershipLostError` or
        `RemoteLogMetadataNotReadyError` if it is that of a newer owner. Unreadable content is no witness. With
        another manifest, or without one, the store may be another place: see `_check_place`."""
        services, partition = self._services, self._partition
        if stored is not None and self._is_own(stored):
            return
        try:
            other = self._decoded(stored)
        except RemoteLogMetadataError:
            return
        if not self.is_accepted:
            try:
                await self._check_place()
            except RemoteStorageError:
                self._is_checked = False  # as for `MetadataLostError`
                raise
        if other is None:
            return
        if other.is_later_than(services.metadata.position(partition)):
            await services.metadata.ensure_fresh(partition, 0, services.settings.request_timeout_ms)
            services.require_ownership(partition)
            await check_positions(services, other)
            if other.is_later_than(services.metadata.position(partition)):
                raise RemoteLogMetadataNotReadyError(
                    f"the manifest of {partition} reflects offset {other.position.next_offset} of the metadata, which"
                    " this owner has not read: it does not replace the manifest"
                )
        await refuse_to_forget(services, partition, other)

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

    async def _judge_acceptance(self) -> None:
        """Decides whether the recorded acceptance counts, and ends it if the operator saw another manifest.

        Costs one GET while an acceptance is recorded."""
        self._is_accepted = self._is_written_since_accepted = False
        services, partition = self._services, self._partition
        accepted = services.metadata.acceptance(partition)
        if accepted is None:
            return
        found = witness_of(await self._fetch())
        if accepted == found:
            self._is_accepted = True
            return
        await services.metadata.end_acceptance(partition)
        logger.warning(
            "an operator accepted another state than the owner finds: the acceptance ends without effect; check what"
            " is missing, and accept again",
            extra={"partition": str(partition), "accepted": accepted, "found": found},
        )

    async def _check_place(self) -> None:
        """Checks that a store without this owner's manifest is the place of the tier: its home has something that was
        copied.

        The manifest and new copies go home, so segments in other locations show nothing. Raises `MetadataLostError`
        when the store has no segment of this partition, though it was copied. If it has some, but none at home, or if
        the partition was never copied, the method raises the errors of `StorePlace`, and `RemoteStorageError` when
        this owner had a manifest and no partition was ever copied."""
        services, partition = self._services, self._partition
        storage, metadata = services.storage, services.metadata
        if any(each.is_finished for each in metadata.stored_segments(partition)):
            if await has_segment_of(storage, metadata, partition, is_home=True):
                return
            if not await has_segment_of(storage, metadata, partition):
                raise MetadataLostError(
                    f"the store has neither the manifest of {partition} nor its oldest segments: does [storage] name"
                    " another place than that of the process which copied them? Correct it; if the store lost them,"
                    " `tidegate tier accept` ends this doubt, and their records stay unreadable"
                )
        is_found = await services.place.check(
            storage, metadata, services.cluster_id, knows_all_partitions=services.knows_all_partitions
        )
        if self._stored is not None and not is_found:
            raise RemoteStorageError(
                f"the store had the manifest of {partition}, and has nothing of the tier now: is it not mounted?"
                " Correct that; if the store was emptied on purpose, restart this process"
            )
