"""`earliest_readable` computes where the log of both tiers starts, from the metadata and the local log start."""

from __future__ import annotations

from tiers.metadata.log_history import ConfirmedLogStart
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition


def earliest_readable(
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    local_log_start: int,
    confirmed: ConfirmedLogStart | None = None,
) -> int | None:
    """Returns the log start of both tiers together: the first offset that a fetch can read. None: not tiered.

    `confirmed` is the leader's answer about the recorded log starts. Without it, a recorded log start above the local
    one does not count, since the leader may deny it. The result lies after a gap at the head of the log, recorded or
    not.
    """
    if confirmed is None:
        log_start = metadata.log_start_offset(partition)
    else:
        log_start = metadata.earliest_offset(partition) if confirmed.offset is None else confirmed.offset
    if log_start is None:
        return local_log_start if metadata.is_known(partition) else None
    if log_start >= local_log_start:
        is_confirmed = confirmed is not None and confirmed.offset is not None
        return log_start if is_confirmed else local_log_start
    segment = metadata.next_segment(partition, log_start)
    if segment is None:
        return local_log_start
    return min(max(log_start, segment.start_offset), local_log_start)
