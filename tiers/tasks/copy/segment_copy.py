"""Copies one built segment: COPY_SEGMENT_STARTED, the objects, read back, COPY_SEGMENT_FINISHED, in this order.

Before the objects are read back, the store must have the partition manifest (docs/design.md, safety rule 5).

Then the owner appends the segment's entries to its local index files (docs/founding.md, "Local index files"). After a
crash before that, a reader fetches the entries from the store.

Every attempt has a new uuid. An attempt that ends early leaves COPY_SEGMENT_STARTED, which `collect_leftovers` deletes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from tiers.errors import CustomMetadataTooLargeError, RemoteStorageError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import encode_indexes_object
from tiers.segment.segment_builder import BuiltSegment
from tiers.segment.segment_encryption import KeyRing, seal_segment
from tiers.storage.activity import while_active
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.copy.spool import Spool
from tiers.tasks.deletion.segment_deletion import delete_segment, write_state
from tiers.tasks.task_services import TaskServices
from tiers.verify.read_back import verify_copied_segment

logger = logging.getLogger(__name__)


async def copy_segment(
    services: TaskServices,
    segment_id: RemoteLogSegmentId,
    built: BuiltSegment,
    progress: Callable[[], None],
    check_place: Callable[[], Awaitable[None]],
) -> None:
    """Makes one attempt to copy the segment. `progress` is called after each step that took a peer's time, and
    for the bytes that a step moves. `check_place` is called before the objects are read back, and raises if the store
    is another place than that of the tier."""
    partition = segment_id.topic_id_partition
    services.metrics.copy_requests.labels(partition.topic).inc()
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
    )
    await services.metadata.add_remote_log_segment_metadata(segment)
    services.checkpoint("copy-started-written")
    storage, settings = services.storage, services.settings
    async with while_active(None, progress):
        stored, custom_metadata = await write_objects(storage, services.spool, services.key_ring, built, segment)
    progress()
    services.checkpoint("objects-written")
    if custom_metadata is not None and len(custom_metadata) > services.settings.remote_log.custom_metadata_max_bytes:
        try:
            await delete_segment(services, segment, custom_metadata)
        except RemoteStorageError as error:  # one attempt is enough: the DELETE record makes the rest a leftover
            logger.warning(
                "a segment with too much custom metadata could not be deleted",
                extra={
                    "partition": str(partition),
                    "segment": str(segment.segment_id.id),
                    "error": str(error),
                },
            )
        raise CustomMetadataTooLargeError(
            f"{partition}: the store returned {len(custom_metadata)} bytes of custom metadata; "
            f"the limit is {services.settings.remote_log.custom_metadata_max_bytes}"
        )
    segment = replace(segment, custom_metadata=custom_metadata)
    # In this order, since the file system may be mounted again meanwhile: the right place must have the objects.
    await check_place()
    async with while_active(None, progress):
        await verify_copied_segment(storage, segment, stored, settings.verify_bytes, services.key_ring)
    progress()
    services.checkpoint("copy-verified")
    await write_state(services, segment, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
    progress()
    services.checkpoint("copy-finished-written")
    services.metrics.copy_bytes.labels(partition.topic).inc(built.size_bytes)
    if built.missing_offsets:
        logger.warning(
            "the log has no records for some offsets of a segment",
            extra={"partition": str(partition), "missing_offsets": built.missing_offsets},
        )
    await _append_to_local_indexes(services, segment, stored)


async def _append_to_local_indexes(
    services: TaskServices, segment: RemoteLogSegmentMetadata, stored: BuiltSegment
) -> None:
    try:
        raw = await services.spool.run(lambda: encode_indexes_object(segment, stored.indexes))
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
) -> tuple[BuiltSegment, bytes | None]:
    """Writes the objects of a segment. Returns what was stored, encrypted if there is a key, and custom metadata.

    The custom metadata is what the store returned."""
    async with _sealed(spool, key_ring, built, segment) as stored:
        data = await spool.run(lambda: stored.log_segment_data(segment))
        return stored, await storage.copy_log_segment_data(segment, data)


@asynccontextmanager
async def _sealed(
    spool: Spool, key_ring: KeyRing, built: BuiltSegment, segment: RemoteLogSegmentMetadata
) -> AsyncIterator[BuiltSegment]:
    """Yields what the store gets: the segment unchanged, or encrypted into a file that is removed after the copy."""
    if key_ring.current is None:
        yield built
        return
    path = spool.new_path(segment.topic_id_partition)
    spool.grow(built.size_bytes)
    try:
        yield await spool.run(lambda: seal_segment(built, segment.segment_id.id, key_ring, path))
    finally:
        path.unlink(missing_ok=True)
        spool.shrink(built.size_bytes)
