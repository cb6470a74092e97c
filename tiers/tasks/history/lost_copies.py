"""Finds copies in the store that may be the only ones of their records, though the metadata does not know their end.

The owner itself trims no segment before the manifest accepts it. But the broker's own retention does not wait for the
manifest, and may have removed the records of a copy whose end the metadata lost (docs/design.md, safety rule 5).
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from tiers.errors import CorruptSegmentError, LaterFormatError, MetadataLostError, RemoteResourceNotFoundError
from tiers.metadata.log_history import is_of_the_history
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import INDEXES_SUFFIX, indexes_key, parse_segment_key, partition_prefix, segment_of_key
from tiers.tasks.copy.copy_attempts import unfinished_segments
from tiers.tasks.history.stored_manifest import WAY_BACK
from tiers.tasks.task_services import TaskServices


async def check_store(services: TaskServices, partition: TopicIdPartition, dead: Collection[UUID], gap: LogGap) -> None:
    """Raises `MetadataLostError` when the store has a whole segment with records of the gap that is unknown.

    `dead` are the segments that the manifest calls dead. Raises the store's errors."""
    async for found in services.storage.list_objects(partition_prefix(services.cluster_id, partition)):
        key = parse_segment_key(found.key)
        if key is None or key.suffix != INDEXES_SUFFIX or key.segment_uuid in dead:
            continue
        segment = segment_of_key(key, found.custom_metadata)
        is_in_gap = segment.start_offset < gap.next_offset and gap.first_offset <= segment.end_offset
        is_known = services.metadata.remote_log_segment_metadata_by_id(segment.segment_id) is not None
        if is_in_gap and not is_known and await is_whole(services, segment):
            raise MetadataLostError(
                f"records of {partition} are in neither tier by the metadata, but the store has them in segment"
                f" {key.segment_uuid}: metadata was lost: {WAY_BACK}"
            )


async def is_whole(services: TaskServices, copy: RemoteLogSegmentMetadata) -> bool:
    """Returns whether the store has the segment's `.indexes`, which is written last, and the `.log` that it describes.

    A copy counts only after it was read back, so a copy that the store has damaged never had an end that the metadata
    could have lost, and `rebuild` does not restore it. Reads the last chunk alone. In doubt a copy is whole: a `.log`
    that is not found may be in another location, and an owner of a later release may have written a format that this
    one does not read. Looks for `.indexes` in every location, since the record of an
    unfinished copy names none. Raises the store's errors."""
    # One answer may be damaged on its way, and the gap that is recorded because of it stays.
    return await _reads_whole(services, copy) or await _reads_whole(services, copy)


async def _reads_whole(services: TaskServices, copy: RemoteLogSegmentMetadata) -> bool:
    try:
        indexes = await services.storage.fetch_indexes(copy)
    except RemoteResourceNotFoundError:
        try:
            indexes = await services.storage.get_object(indexes_key(services.cluster_id, copy))
        except RemoteResourceNotFoundError:
            return False
    try:
        last = decode_indexes_object(indexes, copy).chunks()[-1]
    except LaterFormatError:
        return True
    except CorruptSegmentError:
        return False
    end = last.stored_position + last.stored_bytes
    try:
        stored = await services.storage.fetch_log_segment(copy, last.stored_position, end - 1)
    except RemoteResourceNotFoundError:
        return True
    return len(stored) == last.stored_bytes


async def copies_to_spare(
    services: TaskServices, partition: TopicIdPartition, local_log_start: int
) -> set[RemoteLogSegmentId]:
    """Returns the whole copies without an end that may be the only durable ones of their records.

    The owner may have the records in its spool, which ends with the process or the ownership. So another copy has to
    end before these are deleted. Of several copies of one range, the oldest is enough. Raises the store's errors."""
    spared: dict[object, RemoteLogSegmentId] = {}
    copies = last_copies(services.metadata, partition, local_log_start)
    for one in sorted(copies, key=lambda copy: copy.event_timestamp_ms):
        records = one.start_offset, one.end_offset, one.segment_leader_epochs
        if records not in spared and await is_whole(services, one):
            spared[records] = one.segment_id
    return {*spared.values()}


def last_copies(
    metadata: RemoteLogMetadataManager, partition: TopicIdPartition, local_log_start: int
) -> list[RemoteLogSegmentMetadata]:
    """Returns the copies without an end that have a record of neither the local log nor a readable segment.

    Records that a user or the topic's retention deleted do not count."""
    found = []
    for leftover in unfinished_segments(metadata, partition):
        deleted_to = [
            start.offset
            for start in metadata.log_starts(partition)
            if start.reason is not LogStartReason.SEEN
            and is_of_the_history(start, leftover.segment_leader_epochs, leftover.end_offset)
        ]
        offset = max([leftover.start_offset, *deleted_to])
        while (readable := metadata.remote_log_segment_metadata(partition, offset)) is not None:
            offset = readable.valid_end_offset + 1
        is_copy = leftover.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED
        if is_copy and offset <= leftover.end_offset and offset < local_log_start:
            found.append(leftover)
    return found
