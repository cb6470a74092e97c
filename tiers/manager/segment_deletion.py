"""Deleting one remote segment: DELETE_SEGMENT_STARTED, the objects, DELETE_SEGMENT_FINISHED, in this order.

Only what has a DELETE record is ever deleted (DESIGN, safety rule 3). Every step may be repeated after a crash.
What the store does not delete is tried again with a backoff per segment, and published (`failed_deletions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from tiers.each_of import each_of
from tiers.errors import OwnershipLostError, RemoteLogError, RemoteStorageError, RetriableRemoteStorageError
from tiers.manager.copy_attempts import unfinished_attempts, unfinished_segments
from tiers.manager.failed_deletions import StillPublishedError
from tiers.manager.task_services import TaskServices
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate
from tiers.model.segment_state import RemoteLogSegmentState

_FAILURES_PER_ROUND = 3
"""In a row: then the store is in trouble, and is left alone until the next round."""
_LEFTOVERS_AT_ONCE = 8


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
        await finish_deletion(services, segment)
        services.checkpoint("delete-finished-written")
    except Exception:
        services.metrics.delete_errors.labels(topic).inc()
        raise


async def finish_deletion(services: TaskServices, segment: RemoteLogSegmentMetadata) -> None:
    """Its objects are gone. `segment` is as it was before the deletion began, if that was now."""
    if segment.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
        # An earlier attempt, of whatever process, may have been published. While its record is there, so is ours.
        await _take_back(services, segment)
    await write_state(services, segment, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED)


async def _take_back(services: TaskServices, segment: RemoteLogSegmentMetadata) -> None:
    try:
        await services.failed_deletions.deleted(segment.segment_id)
    except RemoteLogError as error:
        raise StillPublishedError(
            f"{segment.segment_id.id} is deleted, but what was published of it cannot be taken back: {error}"
        ) from error


def is_due(services: TaskServices, segment: RemoteLogSegmentMetadata) -> bool:
    """Whether its deletion may be tried: it never failed here, or long enough ago."""
    return services.failed_deletions.is_due(segment.segment_id, services.clock_ms())


async def try_to_delete(services: TaskServices, segment: RemoteLogSegmentMetadata) -> bool:
    """False when the store failed; it is to be asked again when the segment `is_due`. Raises what the metadata
    manager raises."""
    try:
        await delete_segment(services, segment)
    except RemoteStorageError as error:
        await services.failed_deletions.failed(segment, error, services.clock_ms(), services.wall_clock_ms())
        return False
    finally:
        services.metrics.failed_deletions.set(services.failed_deletions.count)
    return True


async def delete_all(
    services: TaskServices, segments: Iterable[RemoteLogSegmentMetadata], check: Callable[[], None]
) -> int:
    """How many went, of those that are due; the store that fails is left alone until the next round. `check` is called
    before each, and what it raises comes out."""
    deleted = failed = 0
    for segment in segments:
        check()
        if not is_due(services, segment):
            continue
        if await try_to_delete(services, segment):
            deleted, failed = deleted + 1, 0
            continue
        failed += 1
        if failed == _FAILURES_PER_ROUND:
            break
    return deleted


async def collect_leftovers(services: TaskServices, partition: TopicIdPartition) -> int:
    """Deletes what copies and deletions that did not end have left; returns how many. No copy may be under way.

    What is not due again yet is left for a later round, but for the newest copy of what is to be copied next: whether
    its objects go tells how the store is (`copy_attempts`). One at a time, until the store has deleted one and as soon
    as it fails; several otherwise."""
    leftovers = unfinished_segments(services.metadata, partition)
    labels = partition.topic, str(partition.partition)
    services.metrics.delete_lag_segments.labels(*labels).set(len(leftovers))
    services.metrics.delete_lag_bytes.labels(*labels).set(sum(one.segment_size_bytes for one in leftovers))
    newest = next(iter(unfinished_attempts(services.metadata, partition)), None)
    due = sorted((one for one in leftovers if one == newest or is_due(services, one)), key=lambda one: one != newest)
    troubles: list[RemoteLogError] = []

    async def collect(leftover: RemoteLogSegmentMetadata) -> bool | None:
        """None: it is no leftover any more, or there is trouble."""
        try:
            if not services.metadata.owns(partition):
                raise OwnershipLostError(f"{partition} is owned by another member")
            # It may have been somebody else's since the list was made: what they finished, or deleted, is no leftover.
            known = services.metadata.remote_log_segment_metadata_by_id(leftover.segment_id)
            if known is None or known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
                return None
            return await try_to_delete(services, known)
        except RemoteLogError as error:
            troubles.append(error)
            return None

    collected = failed = begun = 0
    while begun < len(due) and failed < _FAILURES_PER_ROUND:
        at_once = _LEFTOVERS_AT_ONCE if collected and not failed else 1
        several = due[begun : begun + at_once]
        begun += at_once
        for gone in await each_of(several, collect, at_once):
            if gone is not None:
                collected, failed = collected + gone, 0 if gone else failed + 1
        if troubles:
            # Not before the others have come to their end: a write of metadata that is cut off costs the ownership.
            raise troubles[0]
    await end_copy_plans(services, partition)
    return collected


async def end_copy_plans(services: TaskServices, partition: TopicIdPartition) -> None:
    """Those of which nothing is left to be deleted. No copy of them may be under way."""
    plans = services.metadata.copy_plans(partition)
    if not plans:
        return
    left = {one.segment_id for one in unfinished_segments(services.metadata, partition)}
    for plan in plans:
        if left.isdisjoint(plan.segment_ids()):
            await services.metadata.end_copy_plan(plan)
