"""Deletes remote segments: DELETE_SEGMENT_STARTED, the objects, DELETE_SEGMENT_FINISHED, in this order.

Only a segment with a DELETE record is ever deleted (docs/design.md, safety rule 3). Every step may be repeated after a
crash. A failed deletion is retried with a backoff per segment, and published (`failed_deletions`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from tiers.bounded_gather import bounded_gather
from tiers.errors import CircuitOpenError, RemoteLogError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.tasks.task_services import TaskServices

_FAILURES_PER_ROUND = 3
"""After this many failures in a row, the store is in trouble, and is not asked again before the next round."""
_ATTEMPTS_AT_ONCE = 8


async def delete_segment(
    services: TaskServices, segment: RemoteLogSegmentMetadata, unrecorded: bytes | None = None
) -> None:
    """Deletes a segment. A later call continues where an earlier one failed.

    `unrecorded` is custom metadata that no record has; the store gets it. Raises the errors of the store and of the
    metadata manager."""
    topic = segment.topic_id_partition.topic
    services.metrics.note(topic)
    services.metrics.delete_requests.labels(topic).inc()
    try:
        if segment.state is not RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
            await services.write_state(segment, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
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
    """Records that the objects are gone. `segment` is as it was before this call's deletion began."""
    if segment.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
        # An earlier attempt, of any process, may have published a failure. The DELETE record stays until it is
        # retracted.
        try:
            await services.failed_deletions.deleted(segment.segment_id)
        except RemoteLogError as error:
            raise RetriableRemoteStorageError(
                f"{segment.segment_id.id} is deleted, but the published record of its failure cannot be retracted:"
                f" {error}"
            ) from error
    await services.write_state(segment, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED)


def is_due(services: TaskServices, segment: RemoteLogSegmentMetadata) -> bool:
    """Returns whether the deletion may be tried: it never failed in this process, or its backoff has passed."""
    return services.failed_deletions.is_due(segment.segment_id, services.clock_ms())


async def try_to_delete(services: TaskServices, segment: RemoteLogSegmentMetadata) -> bool:
    """Tries to delete a segment. Returns False when the store failed; the segment is retried when it `is_due`.

    Raises the errors of the metadata manager."""
    try:
        await delete_segment(services, segment)
    except CircuitOpenError:
        return False  # the store was not asked, so this is no failed attempt
    except RemoteStorageError as error:
        await services.failed_deletions.failed(segment, error, services.clock_ms(), services.wall_clock_ms())
        return False
    finally:
        services.metrics.failed_deletions.set(services.failed_deletions.count)
    return True


async def delete_all(
    services: TaskServices, segments: Iterable[RemoteLogSegmentMetadata], check: Callable[[], None]
) -> int:
    """Deletes the segments that are due, one after the other. Returns how many were deleted.

    `check` is called before each segment, and its exceptions reach the caller."""

    async def delete(segment: RemoteLogSegmentMetadata) -> bool:
        check()
        return await try_to_delete(services, segment)

    return await _delete_due(services, segments, delete, at_once=1)


async def _delete_due(
    services: TaskServices,
    segments: Iterable[RemoteLogSegmentMetadata],
    delete: Callable[[RemoteLogSegmentMetadata], Awaitable[bool | None]],
    at_once: int,
) -> int:
    """Calls `delete` for the segments that are due. Returns how many were deleted.

    It deletes one segment at a time until the store has deleted one, and again as soon as the store fails. Otherwise it
    deletes several at a time. After some failures in a row it stops, and the next round continues. `delete` returns
    None for a segment that is left alone."""
    troubles: list[RemoteLogError] = []

    async def tried(segment: RemoteLogSegmentMetadata) -> bool | None:
        try:
            return await delete(segment)
        except RemoteLogError as error:
            troubles.append(error)
            return None

    due = [each for each in segments if is_due(services, each)]
    deleted = failed = started = 0
    while started < len(due) and failed < _FAILURES_PER_ROUND:
        count = at_once if deleted and not failed else 1
        several = due[started : started + count]
        started += count
        for gone in await bounded_gather(several, tried, count):
            if gone is not None:
                deleted, failed = deleted + gone, 0 if gone else failed + 1
        if troubles:
            # Raised after the others have ended, since a cancelled write of metadata costs the ownership.
            raise troubles[0]
    return deleted


async def delete_attempts(
    services: TaskServices,
    partition: TopicIdPartition,
    needless: Sequence[RemoteLogSegmentMetadata],
    may_delete: Callable[[], bool] = lambda: True,
) -> int:
    """Deletes the objects of attempts that are not needed any more, and goes on with deletions that have begun.

    Returns how many segments it deleted, several at a time. It ends when `may_delete` returns False. Raises
    `RemoteStorageError` when the store is another place than that of the tier."""
    begun = [
        each.metadata
        for each in services.state.segments_apart(partition)
        if each.state == RemoteLogSegmentState.DELETE_SEGMENT_STARTED
    ]
    known = [*begun, *needless]
    labels = partition.topic, str(partition.partition)
    services.metrics.delete_lag_segments.labels(*labels).set(len(known))
    services.metrics.delete_lag_bytes.labels(*labels).set(sum(one.segment_size_bytes for one in known))
    due = [one for one in known if is_due(services, one)]
    if due:
        await services.place.require(services, due)

    async def delete(segment: RemoteLogSegmentMetadata) -> bool | None:
        """Returns None if another owner has finished or deleted the segment."""
        services.require_ownership(partition)
        if not may_delete():
            return None
        known = services.state.remote_log_segment_metadata_by_id(segment.segment_id)
        if known is None or known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            return None
        return await try_to_delete(services, known)

    deleted = await _delete_due(services, due, delete, _ATTEMPTS_AT_ONCE)
    await end_copy_plans(services, partition)
    return deleted


async def end_copy_plans(services: TaskServices, partition: TopicIdPartition) -> None:
    """Ends the copy plans without remaining segments to delete. No copy of them may be in progress."""
    plans = services.state.copy_plans(partition)
    if not plans:
        return
    apart = services.state.segments_apart(partition)
    left = {one.metadata.segment_id for one in apart if not one.is_finished}
    for plan in plans:
        if left.isdisjoint(plan.segment_ids()):
            await services.metadata.end_copy_plan(plan)
