"""Copies that did not end, and when the next one may begin.

While a store is down every attempt leaves one more COPY_SEGMENT_STARTED, to be deleted later. So the objects of the
newest attempt at what is to be copied next have to go first; `collect_leftovers` asks for that in every round. While
the store refuses, the next attempt waits from the newest one's last record on, which every owner sees:

* refused for now: the store is in trouble, 15 minutes; refused for good, when it may be this one object, or refused by
  one store of several, when the next attempt may go to another one: a minute;
* twice as long with each attempt that is left, at most an hour. An object that never goes stops no copying for ever,
  and one copy that succeeds has all before it forgotten.
"""

from __future__ import annotations

from tiers.errors import RetriableRemoteStorageError, SomeStoresInTroubleError
from tiers.manager.failed_deletions import StillPublishedError
from tiers.manager.task_services import TaskServices
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

_UNFINISHED = (RemoteLogSegmentState.COPY_SEGMENT_STARTED, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
_PAUSE_WHILE_IN_TROUBLE_MS = 15 * 60_000
_PAUSE_WHEN_REFUSED_MS = 60_000
_MAX_PAUSE_MS = 3_600_000
_LEFT_AFTER_MS = 60_000


def unfinished_segments(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, min_offset: int = 0
) -> list[RemoteLogSegmentMetadata]:
    """Those that neither are readable nor gone, and end at `min_offset` or later."""
    segments = metadata.list_remote_log_segments(partition, min_offset)
    return [one for one in segments if one.state in _UNFINISHED]


def unfinished_attempts(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition
) -> list[RemoteLogSegmentMetadata]:
    """At what is to be copied next, the newest first."""
    remote_end = metadata.remote_end_offset(partition)
    log_start = metadata.log_start_offset(partition)
    next_offset = max(0 if remote_end is None else remote_end + 1, log_start or 0)
    attempts = unfinished_segments(metadata, partition, next_offset)
    return sorted(attempts, key=lambda one: one.event_timestamp_ms, reverse=True)


def copy_failing_since_ms(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, now_ms: int) -> int | None:
    """As anybody can tell by the metadata: when the oldest attempt at what is to be copied next was left, if it was a
    minute ago or more; None: the last copy ended well, or is under way."""
    attempts = unfinished_attempts(metadata, partition)
    if not attempts or now_ms - attempts[-1].event_timestamp_ms < _LEFT_AFTER_MS:
        return None
    return attempts[-1].event_timestamp_ms


def check_last_attempt(services: TaskServices, partition: TopicIdPartition) -> None:
    """After `collect_leftovers`. Raises `RetriableRemoteStorageError` when no new attempt may begin yet."""
    attempts = unfinished_attempts(services.metadata, partition)
    if not attempts:
        return
    newest = attempts[0]
    error = services.failed_deletions.last_error(newest.segment_id)
    if error is None or isinstance(error, StillPublishedError):
        return
    is_in_trouble = error.retriable and not isinstance(error, SomeStoresInTroubleError)
    pause_ms = _PAUSE_WHILE_IN_TROUBLE_MS if is_in_trouble else _PAUSE_WHEN_REFUSED_MS
    pause_ms = min(_MAX_PAUSE_MS, pause_ms << min(len(attempts) - 1, 10))
    # Of a record from our clock's future nobody knows when it was written.
    if 0 <= services.wall_clock_ms() - newest.event_timestamp_ms < pause_ms:
        raise RetriableRemoteStorageError(
            f"copying waits: the objects of the last attempt, {newest.segment_id.id}, cannot be deleted: {error}"
        ) from error
