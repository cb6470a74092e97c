"""`earliest_readable`: where the log of both tiers starts, which the metadata alone does not say."""

from __future__ import annotations

from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition


def earliest_readable(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, local_log_start: int
) -> int | None:
    """The log start of both tiers together: the first offset that a fetch can be answered for.

    Above the recorded log start only while a hole (safety rule 5) awaits its owner. None: not tiered.
    """
    log_start = metadata.log_start_offset(partition)
    if log_start is None or log_start >= local_log_start:
        return log_start
    segment = metadata.next_segment(partition, log_start)
    if segment is None:
        return local_log_start
    return min(max(log_start, segment.start_offset), local_log_start)
