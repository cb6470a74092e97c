"""Deletes remote segments: DELETE_SEGMENT_STARTED, the objects, DELETE_SEGMENT_FINISHED, in this order.

Only a segment with a DELETE record is ever deleted (docs/design.md, safety rule 3). Every step may be repeated after a
crash. A failed deletion is retried with a backoff per segment, and published (`failed_deletions`).

A process that was paused in the middle of a copy may send its PUT long after another owner deleted the segment. A copy
gives up after half of `remote.log.deleted.segment.retention.ms`. So hardly any PUT arrives after the whole time, and a
second deletion removes what came late. Only then the metadata forgets the segment (docs/design.md, "Objects").
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from tiers.bounded_gather import bounded_gather
from tiers.errors import CircuitOpenError, RemoteLogError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.tasks.task_services import TaskServices

_FAILURES_PER_ROUND = 3
"""After this many failures in a row, the store is in trouble, and is not asked again before the next round."""
_DELETIONS_AT_ONCE = 8
_FORGOTTEN_AT_ONCE = 100
logger = logging.getLogger(__name__)


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


def _due(services: TaskServices, segments: Iterable[RemoteLogSegmentMetadata]) -> list[RemoteLogSegmentMetadata]:
    now_ms = services.clock_ms()
    return [each for each in segments if services.failed_deletions.is_due(each.segment_id, now_ms)]


async def try_to_delete(services: TaskServices, segment: RemoteLogSegmentMetadata) -> bool:
    """Tries to delete a segment. Returns False when the store failed; the segment is retried later.

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

    due = _due(services, segments)
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
    may_delete: Callable[[RemoteLogSegmentMetadata], bool] = lambda segment: True,
) -> int:
    """Deletes the objects of attempts that are not needed any more, and goes on with deletions that have begun.

    Returns how many segments it deleted, several at a time. It leaves a segment alone for which `may_delete` returns
    False. Raises `RemoteStorageError` when the store is another place than that of the tier."""
    begun = [
        each.metadata
        for each in services.state.segments_apart(partition)
        if each.state == RemoteLogSegmentState.DELETE_SEGMENT_STARTED
    ]
    known = [*begun, *needless]
    labels = partition.topic, str(partition.partition)
    services.metrics.delete_lag_segments.labels(*labels).set(len(known))
    services.metrics.delete_lag_bytes.labels(*labels).set(sum(one.segment_size_bytes for one in known))
    due = _due(services, known)
    if due:
        await services.place.require(services, due)

    async def delete(segment: RemoteLogSegmentMetadata) -> bool | None:
        """Returns None if another owner has finished or deleted the segment."""
        services.require_ownership(partition)
        if not may_delete(segment):
            return None
        known = services.state.remote_log_segment_metadata_by_id(segment.segment_id)
        if known is None or known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            return None
        return await try_to_delete(services, known)

    deleted = await _delete_due(services, due, delete, _DELETIONS_AT_ONCE)
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


async def forget_deleted_segments(services: TaskServices) -> int:
    """Deletes the objects of deleted segments once more, and forgets these segments. Returns how many.

    It works on every partition that this process owns, also of topics that are deleted or not tiered any more. A
    segment whose objects cannot be deleted stays for the next run, and holds up no other segment. While a circuit
    breaker is open, the run ends. Raises the first error of the store after the run, and the errors of the metadata
    manager at once."""
    retention_ms = services.settings.remote_log.deleted_segment_retention_ms
    max_skew_ms = services.settings.max_clock_skew_ms
    latest_ms = services.wall_clock_ms() + max_skew_ms - retention_ms
    deleted: dict[TopicIdPartition, list[RemoteLogSegmentMetadata]] = defaultdict(list)
    for segment in services.state.deleted_segments(until_ms=latest_ms):
        if services.log.owns(segment.topic_id_partition):
            deleted[segment.topic_id_partition].append(segment)
    forgotten, troubles = 0, list[RemoteStorageError]()
    for partition, candidates in deleted.items():
        skew_ms = await services.metadata.clock_skew_ms(partition)
        if abs(skew_ms) > max_skew_ms:
            continue
        # The time of a deletion is that of the brokers' clock.
        until_ms = services.wall_clock_ms() + skew_ms - retention_ms
        segments = [one for one in candidates if one.event_timestamp_ms <= until_ms]
        if segments:
            await services.place.require(services, segments)  # another place has no late objects
        for first in range(0, len(segments), _FORGOTTEN_AT_ONCE):
            forgotten += await _forget(services, partition, segments[first : first + _FORGOTTEN_AT_ONCE], troubles)
            if troubles and isinstance(troubles[-1], CircuitOpenError):
                raise troubles[0]
    if troubles:
        raise troubles[0]
    return forgotten


async def _forget(
    services: TaskServices,
    partition: TopicIdPartition,
    segments: Sequence[RemoteLogSegmentMetadata],
    troubles: list[RemoteStorageError],
) -> int:
    gone: list[RemoteLogSegmentId] = []

    async def delete_again(segment: RemoteLogSegmentMetadata) -> None:
        services.require_ownership(partition)
        if services.state.remote_log_segment_metadata_by_id(segment.segment_id) is not None:
            return  # a job announced it again since the list was made, and decides about it
        if troubles and isinstance(troubles[-1], CircuitOpenError):
            return
        try:
            if await services.storage.delete_log_segment_data(segment):
                gone.append(segment.segment_id)
        except RemoteStorageError as error:
            troubles.append(error)

    await bounded_gather(segments, delete_again, _DELETIONS_AT_ONCE)
    if gone:
        services.require_ownership(partition)
        await services.metadata.forget_deleted_segments(gone)
        services.checkpoint("deleted-segments-forgotten")
        logger.debug("deleted segments are forgotten", extra={"partition": str(partition), "segments": len(gone)})
    return len(gone)
