"""Finds whole segments in the store that the metadata does not know: the metadata lost their records.

The owner trims no segment before the manifest accepts it. But the broker's own retention does not wait for the
manifest, and may have removed the records of a copy that the metadata lost (docs/design.md, safety rule 5).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from uuid import UUID

from tiers.errors import CorruptSegmentError, LaterFormatError, RemoteResourceNotFoundError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import INDEXES_SUFFIX, parse_segment_key, partition_prefix, segment_of_key
from tiers.tasks.task_services import TaskServices


async def unknown_segments(
    services: TaskServices, partition: TopicIdPartition, dead: Collection[UUID], hole: LogGap
) -> AsyncIterator[RemoteLogSegmentMetadata]:
    """Yields the whole segments with records of `hole` that the metadata does not know, by the keys of the listing.

    `dead` are the segments that the manifest calls dead. Raises the store's errors."""
    gone = {*dead, *(each.segment_id.id for each in services.metadata.deleted_segments(partition))}
    async for found in services.storage.list_objects(partition_prefix(services.cluster_id, partition)):
        key = parse_segment_key(found.key)
        if key is None or key.suffix != INDEXES_SUFFIX or key.segment_uuid in gone:
            continue
        segment = segment_of_key(key, found.custom_metadata)
        is_in_hole = segment.start_offset < hole.next_offset and hole.first_offset <= segment.end_offset
        is_known = services.metadata.remote_log_segment_metadata_by_id(segment.segment_id) is not None
        if is_in_hole and not is_known and await _is_whole(services, segment):
            yield segment


async def _is_whole(services: TaskServices, segment: RemoteLogSegmentMetadata) -> bool:
    """Returns whether the store has the `.indexes` object, which is written last, and the `.log` that it describes.

    A copy counts only after it was read back, so the metadata never knew one that the store has damaged. Reads the last
    chunk alone. In doubt a segment is whole: an owner of a later release may have written a format that this one does
    not read. Raises the store's errors."""
    # One answer may be damaged on its way, and the gap that is recorded because of it stays.
    return await _reads_whole(services, segment) or await _reads_whole(services, segment)


async def _reads_whole(services: TaskServices, segment: RemoteLogSegmentMetadata) -> bool:
    try:
        last = decode_indexes_object(await services.storage.fetch_indexes(segment), segment).chunks()[-1]
        end = last.stored_position + last.stored_bytes
        return (
            len(await services.storage.fetch_log_segment(segment, last.stored_position, end - 1)) == last.stored_bytes
        )
    except LaterFormatError:
        return True
    except (RemoteResourceNotFoundError, CorruptSegmentError):
        return False
