"""Recorded log starts, together with their leader epochs, and recorded gaps.

A log start has no meaning without its leader epoch: after a broker was emptied or restored, or an out-of-date replica
was elected, its log has another history at the same offsets. `tiers/metadata/log_history.py` decides whether a
leader's log continues the history in which an offset was seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

UNKNOWN_EPOCH = -1


class OffsetAndEpoch(NamedTuple):
    """A next offset that a log had reached, and the epoch of the leader that reported it."""

    offset: int
    leader_epoch: int


class LogStartReason(IntEnum):
    """The reason for a log start. Only `USER` and `RETENTION` delete the records below it."""

    USER = 0
    """A client's DeleteRecords, or an operator's deletion."""
    RETENTION = 1
    """The topic's own retention, applied to segments that the metadata knows."""
    SEEN = 2
    """The first owner saw this log start. Its record marks the partition as tiered and deletes nothing."""


@dataclass(frozen=True, slots=True)
class LogStart:
    """A log start: clients see no record below `offset` in the history that the leader of `leader_epoch` had.

    `last_epoch` is the leader epoch of the record before `offset`, which names the history exactly. A leader that was
    cut off can reach `offset` with records of an epoch that ended before. `UNKNOWN_EPOCH`: it is not known."""

    offset: int
    leader_epoch: int
    reason: LogStartReason
    last_epoch: int = UNKNOWN_EPOCH

    def may_follow(self, offset: int, leader_epoch: int) -> bool:
        """Whether a record below the log start, with this leader epoch, can be of its history.

        The leader epochs of a log ascend."""
        if self.last_epoch == UNKNOWN_EPOCH:
            return leader_epoch <= self.leader_epoch
        return leader_epoch == self.last_epoch or (leader_epoch < self.last_epoch and offset < self.offset - 1)

    def covers(self, trim: OffsetAndEpoch) -> bool:
        """Whether the log start deleted the records below an earlier trim, in every history.

        The trim came before it, unless the leader of the trim is a later one."""
        return self.deletes and self.offset >= trim.offset and self.leader_epoch >= trim.leader_epoch

    def is_void(self, leader_epoch: int, offset: int) -> bool:
        """Whether an operator's CUT in `leader_epoch` from `offset` on ends the log start."""
        return self.deletes and self.offset > offset and self.leader_epoch < leader_epoch

    @property
    def position(self) -> OffsetAndEpoch:
        return OffsetAndEpoch(self.offset, self.leader_epoch)

    @property
    def deletes(self) -> bool:
        return self.reason is not LogStartReason.SEEN


class LogGap(NamedTuple):
    """A gap: the broker removed the offsets [`first_offset`, `next_offset`) before they were copied."""

    first_offset: int
    next_offset: int

    def holds(self, offset: int) -> bool:
        return self.first_offset <= offset < self.next_offset
