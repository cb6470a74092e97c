"""The steps of one copy: build, keep, COPY_SEGMENT_STARTED, the objects, read back, COPY_SEGMENT_FINISHED.

Before the objects are read back, the store must have the marker of the tier (docs/design.md, safety rule 5). An attempt
that ends early leaves COPY_SEGMENT_STARTED and its files in the spool. `CopyAttempts` goes on with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tiers.errors import CorruptSegmentError, CustomMetadataTooLargeError, RemoteResourceNotFoundError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import AbortedTransaction, LogSource
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import SegmentIndexes, decode_indexes_object
from tiers.segment.leader_epochs import EpochHole, UnknownEpochStartError
from tiers.segment.segment_builder import NOTHING_CARRIED, BuiltSegment, Carried, SegmentBuilder
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.activity import while_active
from tiers.storage.object_key import indexes_key
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.copy.spool import KeptSegment, Spool
from tiers.tasks.task_services import TaskServices
from tiers.verify.read_back import read_back

logger = logging.getLogger(__name__)
Progress = Callable[[], None]
"""Called after each step that took a peer's time, and for the bytes that a step moves."""


@dataclass(frozen=True, slots=True)
class SegmentContinuation:
    """What a segment takes over from the one that ends directly before `next_offset`."""

    next_offset: int
    carried: Carried = NOTHING_CARRIED

    @staticmethod
    def behind(built: BuiltSegment) -> SegmentContinuation:
        return SegmentContinuation(built.end_offset + 1, Carried.behind(built.indexes))

    def builder(self, path: Path, base_offset: int) -> SegmentBuilder:
        """Creates the file `path`. Blocks on the disk, and raises `OSError`."""
        return SegmentBuilder(path, base_offset, self.carried)


async def continuation_at(services: TaskServices, partition: TopicIdPartition, start: int) -> SegmentContinuation:
    """Returns what the segment beginning at `start` takes over, from the indexes of the segment before it.

    The spool or the store has them. If the stored ones are unreadable, the metadata has the leader epochs, which
    continue over gaps. The state of producers and transactions is unknown behind a gap and behind a CUT."""
    metadata, end = services.state, start
    for gap in reversed(metadata.gaps(partition)):
        if gap.next_offset == end:
            end = gap.first_offset
    for kept in services.spool.kept_in(partition):
        known = metadata.remote_log_segment_metadata_by_id(kept.metadata.segment_id) or kept.metadata
        if known.valid_end_offset == end - 1:
            raw = await services.spool.run(kept.indexes.read_bytes)
            return _continuation(start, end, known, decode_indexes_object(raw, kept.metadata).indexes)
    previous = metadata.remote_log_segment_metadata(partition, end - 1)
    if previous is None:
        return SegmentContinuation(start)
    try:
        stored = decode_indexes_object(await services.storage.fetch_indexes(previous), previous)
        return _continuation(start, end, previous, stored.indexes)
    except (RemoteResourceNotFoundError, CorruptSegmentError) as error:
        # The metadata lacks the epochs of expired segments. But a lost object must not stop the copying forever.
        logger.error(
            "the newest segment's indexes cannot be read",
            extra={"partition": str(partition), "segment": str(previous.segment_id.id), "error": str(error)},
        )
        return SegmentContinuation(start, Carried(_known_epochs(metadata.list_remote_log_segments(partition), end)))


def _continuation(
    start: int, end: int, previous: RemoteLogSegmentMetadata, indexes: SegmentIndexes
) -> SegmentContinuation:
    """Returns what follows the segment with these indexes, whose valid records end directly before `end`."""
    if previous.end_offset != start - 1:
        # A segment that a CUT cuts also has epochs of the records that were cut off.
        epochs = tuple(one for one in indexes.leader_epochs if one.start_offset < end)
        return SegmentContinuation(start, Carried(epochs))
    return SegmentContinuation(start, Carried.behind(indexes))


def _known_epochs(segments: Iterable[RemoteLogSegmentMetadata], end: int) -> tuple[LeaderEpochEntry, ...]:
    epochs: list[LeaderEpochEntry] = []
    for segment in segments:
        if segment.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            epochs += [
                entry
                for entry in segment.segment_leader_epochs
                if entry.start_offset < min(segment.valid_end_offset + 1, end)
                and (not epochs or entry.epoch > epochs[-1].epoch)
            ]
    return tuple(epochs)


async def append_records(
    builder: SegmentBuilder,
    records: bytes,
    aborted_transactions: tuple[AbortedTransaction, ...],
    spool: Spool,
    source: LogSource,
    partition: TopicIdPartition,
    timeout_ms: int,
) -> None:
    """Appends records of `source`. Raises the errors of `SegmentBuilder.append` except `UnknownEpochStartError`,
    `SpoolError`, and `BrokerError`."""
    named: tuple[LeaderEpochEntry, ...] = ()
    while True:
        try:
            return await spool.run(partial(builder.append, records, aborted_transactions, named))
        except UnknownEpochStartError as error:
            hole = error.hole
        # The answer has the epoch that the builder lacks, so each step names one hole more.
        named += await epochs_in_hole(source, partition, hole, timeout_ms)


async def epochs_in_hole(
    source: LogSource, partition: TopicIdPartition, hole: EpochHole, timeout_ms: int
) -> tuple[LeaderEpochEntry, ...]:
    """Returns the leader epochs from after `hole.known_epoch` to `hole.leader_epoch` where the leader lets them begin.

    None begins below `next_offset`. An epoch whose start the leader does not know begins at the batch."""
    entries: list[LeaderEpochEntry] = []
    epoch, bound = hole.leader_epoch, hole.first_offset
    while epoch > hole.known_epoch:
        if epoch == 0:
            entries.append(LeaderEpochEntry(0, hole.next_offset))
            break
        answer = await source.end_offset_for_epoch(partition, epoch - 1, timeout_ms)
        is_known = 0 <= answer.leader_epoch < epoch
        start = min(max(answer.end_offset, hole.next_offset), bound) if is_known else bound
        if entries and start == bound:
            break  # the leader has forgotten the epochs below (docs/semantics.md 6.1, third row)
        entries.append(LeaderEpochEntry(epoch, start))
        if not is_known or start == hole.next_offset:
            break
        epoch, bound = answer.leader_epoch, start
    return tuple(reversed(entries))


def no_progress() -> None:
    return


def started(
    built: BuiltSegment, segment_id: RemoteLogSegmentId, broker_id: int, now_ms: int, copy_epoch: int
) -> RemoteLogSegmentMetadata:
    """Returns a built segment in COPY_SEGMENT_STARTED. The leader of `copy_epoch` gave its records."""
    return RemoteLogSegmentMetadata(
        segment_id=segment_id,
        start_offset=built.start_offset,
        end_offset=built.end_offset,
        broker_id=broker_id,
        max_timestamp_ms=built.max_timestamp_ms,
        event_timestamp_ms=now_ms,
        segment_leader_epochs=built.segment_leader_epochs,
        segment_size_bytes=built.size_bytes,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
        txn_index_empty=built.txn_index_empty,
        copy_epoch=copy_epoch,
    )


async def keep(
    services: TaskServices, segment_id: RemoteLogSegmentId, built: BuiltSegment, copy_epoch: int
) -> KeptSegment:
    """Keeps a built segment, which has the facts of the partition, for an attempt: see `Spool.keep`."""
    segment = started(built, segment_id, services.settings.broker_id, services.wall_clock_ms(), copy_epoch)
    kept = await services.spool.keep(segment, built, services.key_ring)
    services.checkpoint("segment-kept")
    return kept


async def announce(services: TaskServices, segment: RemoteLogSegmentMetadata) -> None:
    """Writes COPY_SEGMENT_STARTED. Raises the errors of the metadata manager."""
    await services.metadata.add_remote_log_segment_metadata(segment)
    services.checkpoint("copy-started-written")


async def store(
    services: TaskServices, kept: KeptSegment, progress: Progress = no_progress
) -> RemoteLogSegmentMetadata:
    """Writes both objects of the attempt. Returns it with the store's custom metadata. Raises the store's errors.

    Writing them again is harmless, since they are the same bytes."""
    async with while_active(None, progress):
        data = await services.spool.run(kept.data)
        custom_metadata = await services.storage.copy_log_segment_data(kept.metadata, data)
    progress()
    services.checkpoint("objects-written")
    return replace(kept.metadata, custom_metadata=custom_metadata)


async def read_attempt(
    services: TaskServices, attempt: RemoteLogSegmentMetadata, progress: Progress = no_progress
) -> RemoteLogSegmentMetadata:
    """Reads the objects of an attempt back. Returns what its `.indexes` object says of it, and its custom metadata.

    A store may find the objects by that alone, and the record of an attempt lacks it. A listing of the key has it."""
    storage, settings = services.storage, services.settings
    async with while_active(None, progress):
        try:
            found = await read_back(storage, attempt, settings.verify_bytes, services.key_ring)
        except RemoteResourceNotFoundError:
            listed = [each async for each in storage.list_objects(indexes_key(services.cluster_id, attempt))]
            if attempt.custom_metadata is not None or not any(each.custom_metadata for each in listed):
                raise
            attempt = replace(attempt, custom_metadata=listed[0].custom_metadata)
            found = await read_back(storage, attempt, settings.verify_bytes, services.key_ring)
    progress()
    services.checkpoint("copy-verified")
    return replace(found, custom_metadata=attempt.custom_metadata)


async def finish(services: TaskServices, segment: RemoteLogSegmentMetadata, progress: Progress = no_progress) -> None:
    """Writes COPY_SEGMENT_FINISHED for a segment that was read back, and removes its files from the spool."""
    partition, limit_bytes = segment.topic_id_partition, services.settings.remote_log.custom_metadata_max_bytes
    if segment.custom_metadata is not None and len(segment.custom_metadata) > limit_bytes:
        raise CustomMetadataTooLargeError(
            f"{partition}: the store returned {len(segment.custom_metadata)} bytes of custom metadata; the limit is"
            f" {limit_bytes}"
        )
    await services.write_state(segment, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
    progress()
    services.checkpoint("copy-finished-written")
    services.metrics.copy_bytes.labels(partition.topic).inc(segment.segment_size_bytes)
    kept = services.spool.kept_of(segment.segment_id)
    if kept is not None:
        await _append_to_local_indexes(services, segment, kept)
        await services.spool.remove(kept)


async def _append_to_local_indexes(
    services: TaskServices, segment: RemoteLogSegmentMetadata, kept: KeptSegment
) -> None:
    """Appends the entries to the local index files (docs/founding.md, "Local index files").

    Without them, for example after a crash, a reader fetches the entries from the store."""
    try:
        raw = await services.spool.run(kept.indexes.read_bytes)
        await services.local_indexes.put(segment, raw)
    except Exception:  # the segment is copied: nothing about the local files may fail the copy
        logger.warning(
            "the index of a copied segment is not in the local index files; readers fetch it from the store",
            exc_info=True,
            extra={"partition": str(segment.topic_id_partition), "segment": str(segment.segment_id.id)},
        )


async def write_objects(
    storage: RemoteStorageManager,
    spool: Spool,
    key_ring: KeyRing,
    built: BuiltSegment,
    segment: RemoteLogSegmentMetadata,
) -> bytes | None:
    """Writes the objects of a segment for a job, which announced it. Returns the store's custom metadata.

    The spool does not keep the segment: a job that fails makes it again."""
    kept = await spool.keep(segment, built, key_ring)
    try:
        return await storage.copy_log_segment_data(segment, await spool.run(kept.data))
    finally:
        await spool.remove(kept)
