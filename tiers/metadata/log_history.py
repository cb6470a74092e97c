"""Checks whether a leader's log continues the history in which an offset was seen.

See docs/design.md, safety rule 5; docs/semantics.md 6.1.

A leader confirms an offset and its leader epoch when the leader's log reaches the offset by the end of that leader
epoch. A leader that does not confirm them was emptied or restored, or was an out-of-date replica. Its log has other
records at the same offsets, so no offset of the old history may be applied to it.

A leader that was cut off can have records of its old epoch up to such an offset, and those were never committed. So a
log start also has the epoch of the record before it, if that is known. One epoch has one leader: a log with a record of
that epoch at that offset has the same record, and the same records below it.
"""

from __future__ import annotations

from collections.abc import Collection

from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogSource
from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, OffsetAndEpoch


async def confirms(source: LogSource, partition: TopicIdPartition, position: OffsetAndEpoch, timeout_ms: int) -> bool:
    """Returns whether the leader's log had reached `position.offset` by the end of `position.leader_epoch`.

    A leader whose log begins in a later epoch answers with the start of that log. The epoch ended there or before. A
    log that starts at or above the offset has no record below the offset to lose. Raises `BrokerError`."""
    answer = await source.end_offset_for_epoch(partition, position.leader_epoch, timeout_ms)
    return 0 <= answer.leader_epoch <= position.leader_epoch and answer.end_offset >= position.offset


async def confirms_log_start(source: LogSource, partition: TopicIdPartition, start: LogStart, timeout_ms: int) -> bool:
    """Returns whether the leader's log has the history of the log start, or begins at or above it.

    Raises `BrokerError`."""
    if start.last_epoch == UNKNOWN_EPOCH:
        return await confirms(source, partition, start.position, timeout_ms)
    answer = await source.end_offset_for_epoch(partition, start.last_epoch, timeout_ms)
    return answer.leader_epoch == start.last_epoch and answer.end_offset >= start.offset


async def epoch_before(
    source: LogSource, partition: TopicIdPartition, offset: int, leader_epoch: int, timeout_ms: int
) -> int:
    """Returns the leader epoch of the record before `offset`, which must be in the log of the leader of `leader_epoch`.

    That epoch is the lowest one whose end reaches `offset`. `UNKNOWN_EPOCH`: the leader does not know the epochs. The
    caller checks that the leader is the same before and after. If the result is not `leader_epoch`, the caller also
    checks that the log still begins below `offset` after that. Raises `BrokerError`."""
    lowest, highest = 0, leader_epoch
    asked = highest - 1  # most records are of the leader's own epoch
    while lowest < highest:
        answer = await source.end_offset_for_epoch(partition, asked, timeout_ms)
        if not 0 <= answer.leader_epoch <= asked:
            return UNKNOWN_EPOCH
        if answer.end_offset >= offset:
            highest = answer.leader_epoch
        else:
            lowest = asked + 1
        asked = (lowest + highest) // 2
    return highest


async def disproved_log_starts(
    source: LogSource,
    metadata: RemoteLogMetadataState,
    partition: TopicIdPartition,
    timeout_ms: int,
    known: Collection[LogStart] = (),
) -> list[LogStart]:
    """Returns the recorded log starts that the leader does not confirm. It is not asked about those in `known`.

    Two log starts of one position record the same deletion, and one of them may lack the last epoch. So the answer
    about one holds for both. Raises `BrokerError`."""
    recorded = [each for each in metadata.recorded_log_starts(partition) if each.deletes]
    disproved = {
        each.position
        for each in recorded
        if each not in known and not await confirms_log_start(source, partition, each, timeout_ms)
    }
    return [each for each in recorded if each.position in disproved]


async def kept_log_start(
    source: LogSource,
    metadata: RemoteLogMetadataState,
    partition: TopicIdPartition,
    timeout_ms: int,
    known: Collection[LogStart] = (),
) -> int:
    """Returns the highest recorded log start that is in `known`, or that the leader confirms; 0 without one.

    A log start that is recorded meanwhile does not count. Raises `BrokerError`."""
    recorded = metadata.log_starts(partition)
    disproved = await disproved_log_starts(source, metadata, partition, timeout_ms, known)
    return next((start.offset for start in recorded if start not in disproved), 0)
