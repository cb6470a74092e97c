"""Whether the leader's log continues what was copied (semantics 6.5; DESIGN, safety rule 2).

A divergence deletes nothing: copy, trim and expiry of the partition stop until it is gone or an operator decided.
"""

from __future__ import annotations

from tiers.errors import LogDivergedError
from tiers.log.log_source import LogSource
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition


async def check_lineage(
    source: LogSource, partition: TopicIdPartition, leader_epoch: int, next_offset: int, timeout_ms: int
) -> None:
    """Raises `LogDivergedError` unless the leader's log holds `next_offset - 1` in `leader_epoch`.

    A leader that knows only newer epochs (our trims cut its epoch history) answers with the epoch that was asked for
    and the start of its first one (semantics 6.1): that is the same test."""
    answer = await source.end_offset_for_epoch(partition, leader_epoch, timeout_ms)
    if answer.leader_epoch == leader_epoch and answer.end_offset >= next_offset:
        return
    raise LogDivergedError(
        f"{partition}: epoch {leader_epoch} was copied up to offset {next_offset - 1}, "
        f"the leader ends epoch {answer.leader_epoch} at {answer.end_offset}"
    )


async def check_remote_lineage(
    source: LogSource, metadata: RemoteLogMetadataReader, partition: TopicIdPartition, timeout_ms: int
) -> None:
    """The same for the last offset that is remote; nothing remote diverges from nothing."""
    remote_end = metadata.remote_end_offset(partition)
    if remote_end is None:
        return
    last = metadata.remote_log_segment_metadata(partition, remote_end)
    if last is not None:
        await check_lineage(source, partition, last.segment_leader_epochs[-1].epoch, remote_end + 1, timeout_ms)
