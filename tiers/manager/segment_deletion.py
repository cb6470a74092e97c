"""Deleting one remote segment: DELETE_SEGMENT_STARTED, the objects, DELETE_SEGMENT_FINISHED, in this order.

Only what has a DELETE record is ever deleted (DESIGN, safety rule 3). Every step may be repeated after a crash.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from tiers.errors import OwnershipLostError, RemoteStorageError, RetriableRemoteStorageError
from tiers.manager.task_services import TaskServices
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate
from tiers.model.segment_state import RemoteLogSegmentState

_LOG = logging.getLogger(__name__)


async def write_state(
    services: TaskServices,
    segment: RemoteLogSegmentMetadata,
    state: RemoteLogSegmentState,
    custom_metadata: bytes | None = None,
) -> None:
    """Moves `segment` to `state`; every update repeats the custom metadata (DESIGN, RLMM)."""
    await services.metadata.update_remote_log_segment_metadata(
        RemoteLogSegmentMetadataUpdate(
            segment_id=segment.segment_id,
            broker_id=services.settings.broker_id,
            event_timestamp_ms=services.wall_clock_ms(),
            state=state,
            custom_metadata=segment.custom_metadata if custom_metadata is None else custom_metadata,
        )
    )


async def delete_segment(
    services: TaskServices, segment: RemoteLogSegmentMetadata, unrecorded: bytes | None = None
) -> None:
    """Raises what the store or the metadata manager raise; a later call goes on from there. The store is told of
    `unrecorded` custom metadata, which no record has."""
    topic = segment.topic_id_partition.topic
    services.metrics.delete_requests.labels(topic).inc()
    try:
        if segment.state is not RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
            await write_state(services, segment, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
            services.checkpoint("delete-started-written")
        stored = segment if unrecorded is None else replace(segment, custom_metadata=unrecorded)
        if not await services.storage.delete_log_segment_data(stored):
            raise RetriableRemoteStorageError(f"the store did not confirm the deletion of {segment.segment_id.id}")
        services.checkpoint("objects-deleted")
        await write_state(services, segment, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED)
        services.checkpoint("delete-finished-written")
    except Exception:
        services.metrics.delete_errors.labels(topic).inc()
        raise


async def collect_leftovers(services: TaskServices, partition: TopicIdPartition) -> int:
    """Deletes what copies and deletions that did not end have left; returns how many. No copy may be under way.

    A store that fails is asked again in the next round: it does not hold up the copying."""
    unfinished = (RemoteLogSegmentState.COPY_SEGMENT_STARTED, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    leftovers = [one for one in services.metadata.list_remote_log_segments(partition) if one.state in unfinished]
    labels = partition.topic, str(partition.partition)
    services.metrics.delete_lag_segments.labels(*labels).set(len(leftovers))
    services.metrics.delete_lag_bytes.labels(*labels).set(sum(one.segment_size_bytes for one in leftovers))
    collected = 0
    for leftover in leftovers:
        if not services.metadata.owns(partition):
            raise OwnershipLostError(f"{partition} is owned by another member")
        try:
            await delete_segment(services, leftover)
            collected += 1
        except RemoteStorageError as error:
            _LOG.warning(
                "a leftover segment could not be deleted",
                extra={"partition": str(partition), "segment": str(leftover.segment_id.id), "error": str(error)},
            )
    return collected
