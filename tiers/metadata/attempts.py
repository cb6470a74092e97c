"""The attempts at copies that have not ended, by the metadata alone.

An attempt is a segment in COPY_SEGMENT_STARTED: of a copy in progress, or of one whose owner or job failed. Its objects
may be whole, also if the owner that wrote them is gone (docs/design.md, "Attempts").
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from tiers.metadata.log_history import remote_epoch_before
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.copy_plan import NOT_MEASURED_BYTES
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, leader_epoch_at
from tiers.model.segment_state import RemoteLogSegmentState

_LEFT_AFTER_MS = 60_000


def attempts(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, min_offset: int = 0
) -> list[RemoteLogSegmentMetadata]:
    """Returns the attempts that end at `min_offset` or later, by ascending start offset."""
    return list(_begun(metadata, partition, min_offset))


def _begun(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, min_offset: int
) -> Iterator[RemoteLogSegmentMetadata]:
    for segment in metadata.segments_apart(partition):
        if segment.state == RemoteLogSegmentState.COPY_SEGMENT_STARTED and segment.end_offset >= min_offset:
            yield segment.metadata


def is_measured(attempt: RemoteLogSegmentMetadata) -> bool:
    """Returns False for an attempt that only the plan of a job announces. Its leader epochs are not known yet."""
    return attempt.segment_size_bytes != NOT_MEASURED_BYTES


def attempt_at_head(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, log_start: int, local_log_start: int
) -> int | None:
    """Returns the first offset below both the first readable segment and the local log that an attempt holds.

    None: no attempt does, or recorded gaps have its offsets."""
    first = metadata.next_segment(partition, log_start)
    end = local_log_start if first is None else min(local_log_start, first.start_offset)
    for each in _begun(metadata, partition, log_start):
        offset = max(each.start_offset, log_start)
        gap = metadata.gap_at(partition, offset)
        offset = offset if gap is None else gap.next_offset
        if offset < end and offset <= each.valid_end_offset:
            return offset
    return None


def last_attempt(metadata: RemoteLogMetadataReader, partition: TopicIdPartition) -> RemoteLogSegmentMetadata | None:
    """Returns the attempt with known leader epochs that ends highest above the remote end; None without one."""
    remote_end = metadata.remote_end_offset(partition)
    next_offset = 0 if remote_end is None else remote_end + 1
    above = (each for each in _begun(metadata, partition, next_offset) if is_measured(each) and not each.is_cut_off)
    last = max(above, key=lambda each: each.valid_end_offset, default=None)
    return last if last is not None and last.valid_end_offset >= next_offset else None


def begun_end_offset(metadata: RemoteLogMetadataReader, partition: TopicIdPartition) -> int | None:
    """Returns the end (inclusive) of the readable segments and the attempts; None without any."""
    last = last_attempt(metadata, partition)
    return metadata.remote_end_offset(partition) if last is None else last.valid_end_offset


def unread_from(metadata: RemoteLogMetadataReader, attempt: RemoteLogSegmentMetadata, offset: int) -> int | None:
    """Returns the first offset of the attempt, from `offset` on, that no readable segment has; None without one."""
    partition, offset = attempt.topic_id_partition, max(attempt.start_offset, offset)
    while offset <= attempt.end_offset:
        segment = metadata.remote_log_segment_metadata(partition, offset)
        if segment is None:
            return offset
        offset = segment.valid_end_offset + 1
    return None


def copy_failing_since_ms(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, now_ms: int) -> int | None:
    """Returns since when (ms) copying fails, by the metadata alone, so that any process can compute it.

    It is the time of the oldest attempt at the next segment to copy, if that is a minute old or more. None: the last
    copy succeeded, or one is in progress."""
    remote_end = metadata.remote_end_offset(partition)
    next_offset = max(0 if remote_end is None else remote_end + 1, metadata.log_start_offset(partition) or 0)
    began_ms = [each.event_timestamp_ms for each in _begun(metadata, partition, next_offset)]
    oldest_ms = min(began_ms, default=now_ms)
    return oldest_ms if now_ms - oldest_ms >= _LEFT_AFTER_MS else None


def agrees(metadata: RemoteLogMetadataReader, segment: RemoteLogSegmentMetadata, end: int) -> bool:
    """Returns whether the records of a segment up to `end` (inclusive) can be of the history of the readable segments.

    Leader epochs ascend in a log, and one leader epoch has one record at an offset."""
    partition, epochs = segment.topic_id_partition, segment.segment_leader_epochs
    if _epoch_before(metadata, partition, segment.start_offset) > epochs[0].epoch:
        return False
    after = metadata.next_segment(partition, end + 1)
    if after is not None:
        first = max(after.start_offset, end + 1)
        if leader_epoch_at(after.segment_leader_epochs, first) < leader_epoch_at(epochs, end):
            return False
    for other in metadata.answering_segments(partition, segment.start_offset):
        first, last = max(other.start_offset, segment.start_offset), min(other.valid_end_offset, end)
        if first > end:
            break
        known = other.metadata.segment_leader_epochs
        if any(leader_epoch_at(known, at) != leader_epoch_at(epochs, at) for at in (first, last)):
            return False
    return True


def _epoch_before(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, offset: int) -> int:
    """Returns the leader epoch of the last readable record below `offset`, with or without a hole behind it."""
    epoch = remote_epoch_before(metadata, partition, offset)
    if epoch == UNKNOWN_EPOCH:
        runs = takewhile(lambda run: run[0] < offset, metadata.answered_offsets(partition))
        last = max((min(following, offset) for _, following in runs), default=0)
        epoch = remote_epoch_before(metadata, partition, last)
    return epoch
