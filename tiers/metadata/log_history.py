"""Checks whether a leader's log continues the history in which an offset was seen.

See docs/design.md, safety rule 5; docs/semantics.md 6.1.

A leader confirms an offset and its leader epoch when the leader's log reaches the offset by the end of that leader
epoch. A leader that does not confirm them was emptied or restored, or was an out-of-date replica. Its log has other
records at the same offsets, so no offset of the old history may be applied to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import LRUCache

from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogSource
from tiers.model.log_start import LogStart, OffsetAndEpoch

_MAX_PARTITIONS = 100_000


async def confirms(source: LogSource, partition: TopicIdPartition, position: OffsetAndEpoch, timeout_ms: int) -> bool:
    """Returns whether the leader's log had reached `position.offset` by the end of `position.leader_epoch`.

    A leader whose log begins in a later epoch answers with the start of that log. The epoch ended there or before. A
    log that starts at or above the offset has no record below the offset to lose. Raises `BrokerError`."""
    answer = await source.end_offset_for_epoch(partition, position.leader_epoch, timeout_ms)
    return 0 <= answer.leader_epoch <= position.leader_epoch and answer.end_offset >= position.offset


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
        self._answers: LRUCache[TopicIdPartition, tuple[int, dict[OffsetAndEpoch, bool]]] = LRUCache(_MAX_PARTITIONS)

    async def confirmed(self, partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> ConfirmedLogStart:
        """Returns the highest log start that the leader of `leader_epoch` confirms. Raises `BrokerError`."""
        denied: set[LogStart] = set()
        for start in self._metadata.log_starts(partition):
            if await self.holds(partition, start.position, leader_epoch, timeout_ms):
                return ConfirmedLogStart(start.offset, frozenset(denied))
            denied.add(start)
        return ConfirmedLogStart(None, frozenset(denied))

    async def holds(
        self, partition: TopicIdPartition, position: OffsetAndEpoch, leader_epoch: int, timeout_ms: int
    ) -> bool:
        """Returns whether the leader of `leader_epoch` confirms the position. Raises `BrokerError`."""
        known_epoch, answers = self._answers.get(partition, (-1, {}))
        if known_epoch != leader_epoch:
            answers = {}
        if position not in answers:
            answers[position] = await confirms(self._source, partition, position, timeout_ms)
            self._answers[partition] = leader_epoch, answers
        return answers[position]
