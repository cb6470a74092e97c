"""Finds the copies that failed, and decides when the next attempt may begin.

While a store is down, every attempt leaves one more COPY_SEGMENT_STARTED, whose objects must be deleted later. So
before a new attempt begins, the objects of the newest attempt at the same offsets have to be deleted.
`collect_leftovers` asks for that in every round. While the store refuses, the next attempt waits. The wait counts from
the last record of the newest attempt, which every owner sees:

* 15 minutes, if the error is retriable: the store is in trouble.
* One minute, if the error is not retriable, since it may concern this object only. One minute also if one of several
  stores failed, since the next attempt may use another store.
* The wait doubles with each attempt that is left, up to an hour. So an object that cannot be deleted never stops the
  copying forever. After a successful copy, the attempts before it do not count any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiers.errors import RemoteStorageError, RetriableRemoteStorageError, SomeStoresInTroubleError
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.tasks.deletion.failed_deletions import StillPublishedError
from tiers.tasks.hold import Hold, HoldReason
from tiers.tasks.task_services import TaskServices

_UNFINISHED = (RemoteLogSegmentState.COPY_SEGMENT_STARTED, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
_PAUSE_WHILE_IN_TROUBLE_MS = 15 * 60_000
_PAUSE_WHEN_REFUSED_MS = 60_000
_MAX_PAUSE_MS = 3_600_000
_LEFT_AFTER_MS = 60_000


def unfinished_segments(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, min_offset: int = 0
) -> list[RemoteLogSegmentMetadata]:
    """Returns the segments that are neither readable nor gone, and that end at `min_offset` or later."""
    segments = metadata.stored_segments(partition, min_offset)
    return [one.metadata for one in segments if one.state in _UNFINISHED]


def unfinished_attempts(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition
) -> list[RemoteLogSegmentMetadata]:
    """Returns the unfinished attempts at the next segment to copy, the newest first."""
    remote_end = metadata.remote_end_offset(partition)
    log_start = metadata.log_start_offset(partition)
    next_offset = max(0 if remote_end is None else remote_end + 1, log_start or 0)
    attempts = unfinished_segments(metadata, partition, next_offset)
    return sorted(attempts, key=lambda one: one.event_timestamp_ms, reverse=True)


def copy_failing_since_ms(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, now_ms: int) -> int | None:
    """Returns since when (ms) copying fails, judged by the metadata alone, so that any process can tell.

    It is the time of the oldest unfinished attempt at the next segment to copy, if that is a minute old or more. None:
    the last copy succeeded, or one is in progress."""
    attempts = unfinished_attempts(metadata, partition)
    if not attempts or now_ms - attempts[-1].event_timestamp_ms < _LEFT_AFTER_MS:
        return None
    return attempts[-1].event_timestamp_ms


def check_last_attempt(services: TaskServices, partition: TopicIdPartition) -> None:
    """Checks whether a new attempt may begin. The caller has run `collect_leftovers`.

    Raises `RetriableRemoteStorageError` while it may not."""
    attempts = unfinished_attempts(services.metadata, partition)
    error = services.failed_deletions.last_error(attempts[0].segment_id) if attempts else None
    if error is not None and leftovers_hold(attempts, error, services.wall_clock_ms()) is not None:
        raise RetriableRemoteStorageError(
            f"copying waits: the objects of the last attempt, {attempts[0].segment_id.id}, cannot be deleted: {error}"
        ) from error


def leftovers_hold(
    attempts: Sequence[RemoteLogSegmentMetadata], error: RemoteStorageError | None, now_ms: int
) -> Hold | None:
    """Returns why the next attempt waits. `attempts` are `unfinished_attempts`; `error` is the store's last refusal to
    delete the objects of the newest one."""
    if not attempts or error is None or isinstance(error, StillPublishedError):
        return None
    newest_ms = attempts[0].event_timestamp_ms
    is_in_trouble = error.retriable and not isinstance(error, SomeStoresInTroubleError)
    pause_ms = _PAUSE_WHILE_IN_TROUBLE_MS if is_in_trouble else _PAUSE_WHEN_REFUSED_MS
    pause_ms = min(_MAX_PAUSE_MS, pause_ms << min(len(attempts) - 1, 10))
    # A record with a time in the future of this machine's clock has an unknown age, so it delays nothing.
    if not 0 <= now_ms - newest_ms < pause_ms:
        return None
    return Hold(HoldReason.LEFTOVERS_STAY, newest_ms + pause_ms, {"attempts": len(attempts)})
