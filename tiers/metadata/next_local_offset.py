"""NEXT_LOCAL_TIMESTAMP: the offset from which the local log has to be read (docs/founding.md)."""

from __future__ import annotations

from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds


def next_local_offset(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, local: LocalLogBounds, log_start: int
) -> int:
    """Returns the offset below which every record of the log is remote.

    It is the remote end + 1, and at least `log_start`, which the leader confirms. The local log holds the offset, so it
    lies in [local log start, last stable offset] (docs/semantics.md 5.1)."""
    end_offset = metadata.remote_end_offset(partition)
    offset = log_start if end_offset is None else max(log_start, end_offset + 1)
    # The local log begins behind a gap that follows the remote end. If it begins inside the gap, a new leader has
    # records of the gap, and the owner copies them. So the end of the gap does not count.
    return max(local.log_start_offset, min(offset, local.last_stable_offset))
