"""The steps of one attempt at a copy: the spool, COPY_SEGMENT_STARTED, the objects, read back, COPY_SEGMENT_FINISHED.

Before the objects are read back, the store must have the marker of the tier (docs/design.md, safety rule 5).

An attempt that ends early leaves COPY_SEGMENT_STARTED and its files in the spool. `CopyAttempts` goes on with it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from tiers.errors import CustomMetadataTooLargeError, RemoteResourceNotFoundError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.segment_builder import BuiltSegment
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.activity import while_active
from tiers.storage.object_key import indexes_key
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.copy.kept_segments import KeptSegment
from tiers.tasks.copy.spool import Spool
from tiers.tasks.task_services import TaskServices
from tiers.verify.read_back import read_back

logger = logging.getLogger(__name__)
Progress = Callable[[], None]
"""Called after each step that took a peer's time, and for the bytes that a step moves."""


def no_progress() -> None:
    return


async def keep(
    services: TaskServices, segment_id: RemoteLogSegmentId, built: BuiltSegment, copy_epoch: int
) -> KeptSegment:
    """Keeps a built segment in the spool for an attempt. After a `SpoolError`, `built` is as before.

    The leader of `copy_epoch` gave its records, and `built` has the facts of the partition."""
    segment = RemoteLogSegmentMetadata(
        segment_id=segment_id,
        start_offset=built.start_offset,
        end_offset=built.end_offset,
        broker_id=services.settings.broker_id,
        max_timestamp_ms=built.max_timestamp_ms,
        event_timestamp_ms=services.wall_clock_ms(),
        segment_leader_epochs=built.segment_leader_epochs,
        segment_size_bytes=built.size_bytes,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
        txn_index_empty=built.txn_index_empty,
        copy_epoch=copy_epoch,
    )
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

    The record of an attempt has no custom metadata, and a store may find the objects by it alone. So if the store does
    not find them, a listing of that one key has it. Raises the errors of `read_back`."""
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
    async with _kept(spool, key_ring, built, segment) as kept:
        return await storage.copy_log_segment_data(segment, await spool.run(kept.data))


@asynccontextmanager
async def _kept(
    spool: Spool, key_ring: KeyRing, built: BuiltSegment, segment: RemoteLogSegmentMetadata
) -> AsyncIterator[KeptSegment]:
    kept = await spool.keep(segment, built, key_ring)
    try:
        yield kept
    finally:
        await spool.remove(kept)
