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

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cachetools import LRUCache

from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogSource
from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import LeaderEpochEntry, leader_epoch_at

_MAX_PARTITIONS = 100_000


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


def remote_epoch_before(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, offset: int) -> int:
    """Returns the leader epoch of the record before `offset`. `UNKNOWN_EPOCH`: no readable segment has the record."""
    segment = metadata.remote_log_segment_metadata(partition, offset - 1)
    return UNKNOWN_EPOCH if segment is None else leader_epoch_at(segment.segment_leader_epochs, offset - 1)


def is_of_the_history(start: LogStart, leader_epochs: Sequence[LeaderEpochEntry], end_offset: int) -> bool:
    """Returns whether records up to `end_offset` (inclusive) can be of the history of the log start."""
    last = start.offset - 1
    if leader_epochs[-1].epoch > start.leader_epoch:
        return False
    is_named = start.last_epoch != UNKNOWN_EPOCH and leader_epochs[0].start_offset <= last <= end_offset
    return not is_named or leader_epoch_at(leader_epochs, last) == start.last_epoch


@dataclass(frozen=True, slots=True)
class ConfirmedLogStart:
    """A leader's answer about the recorded log starts of a partition.

    `offset` is the highest log start that the leader confirms; None: it confirms none. `denied` has the recorded log
    starts that the leader does not confirm."""

    offset: int | None
    denied: frozenset[LogStart] = frozenset()


class LogStartConfirmation:
    """Asks leaders which recorded log starts they confirm, once per leader epoch and log start."""

    def __init__(self, source: LogSource, metadata: RemoteLogMetadataReader) -> None:
        self._source = source
        self._metadata = metadata
        self._answers: LRUCache[TopicIdPartition, tuple[int, dict[LogStart | OffsetAndEpoch, bool]]] = LRUCache(
            _MAX_PARTITIONS
        )

    async def confirmed(self, partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> ConfirmedLogStart:
        """Returns the highest log start that the leader of `leader_epoch` confirms. Raises `BrokerError`."""
        denied: set[LogStart] = set()
        for start in self._metadata.log_starts(partition):
            ask = partial(confirms_log_start, self._source, partition, start, timeout_ms)
            if await self._once(partition, start, leader_epoch, ask):
                return ConfirmedLogStart(start.offset, frozenset(denied))
            denied.add(start)
        return ConfirmedLogStart(None, frozenset(denied))

    async def holds(
        self, partition: TopicIdPartition, position: OffsetAndEpoch, leader_epoch: int, timeout_ms: int
    ) -> bool:
        """Returns whether the leader of `leader_epoch` confirms the position. Raises `BrokerError`."""
        ask = partial(confirms, self._source, partition, position, timeout_ms)
        return await self._once(partition, position, leader_epoch, ask)

    async def epoch_before(self, partition: TopicIdPartition, offset: int, leader_epoch: int, timeout_ms: int) -> int:
        """Returns the leader epoch of the record before `offset` (see `epoch_before`). Raises `BrokerError`."""
        return await epoch_before(self._source, partition, offset, leader_epoch, timeout_ms)

    async def _once(
        self,
        partition: TopicIdPartition,
        key: LogStart | OffsetAndEpoch,
        leader_epoch: int,
        ask: Callable[[], Awaitable[bool]],
    ) -> bool:
        known_epoch, answers = self._answers.get(partition, (-1, {}))
        if known_epoch != leader_epoch:
            answers = {}
        if key not in answers:
            answers[key] = await ask()
            self._answers[partition] = leader_epoch, answers
        return answers[key]
