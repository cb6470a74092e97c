"""Where the leader epochs of a log begin (docs/semantics.md 6.5).

A batch names its leader epoch. But where compaction has removed the first records of an epoch, the epoch begins in the
hole before its first batch, at the offset of the election. Only the leader, or the metadata of a stored segment, names
that offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.records.record_batch import NO_LEADER_EPOCH
from tiers.errors import RemoteLogError
from tiers.model.segment_metadata import LeaderEpochEntry


@dataclass(frozen=True, slots=True)
class EpochHole:
    """A hole from `next_offset` up to a batch that begins at `first_offset`, in which `leader_epoch` may begin.

    `known_epoch` is the leader epoch before the hole; -1: none is known."""

    known_epoch: int
    next_offset: int
    leader_epoch: int
    first_offset: int


class UnknownEpochStartError(RemoteLogError):
    """The caller named no start of the leader epoch that follows `hole`."""

    def __init__(self, hole: EpochHole) -> None:
        super().__init__(
            f"nothing names the start of leader epoch {hole.leader_epoch}, which is between offsets {hole.next_offset} "
            f"and {hole.first_offset}"
        )
        self.hole = hole


def epochs_begun(hole: EpochHole, named: Sequence[LeaderEpochEntry]) -> list[LeaderEpochEntry]:
    """Returns the leader epochs that begin in the hole or with the batch after it, ascending.

    The hole may be empty. The function ignores entries of `named` that do not lie in it. The first epoch of a log whose
    epochs are not known begins at `next_offset` at the latest."""
    begun = [
        entry
        for entry in named
        if hole.known_epoch < entry.epoch <= hole.leader_epoch
        and hole.next_offset <= entry.start_offset <= hole.first_offset
        and hole.next_offset < hole.first_offset
    ]
    if not begun or begun[-1].epoch < hole.leader_epoch:
        begun.append(LeaderEpochEntry(hole.leader_epoch, hole.first_offset))
    if hole.known_epoch == NO_LEADER_EPOCH:
        begun[0] = LeaderEpochEntry(begun[0].epoch, min(begun[0].start_offset, hole.next_offset))
    return begun


def clipped(leader_epochs: Sequence[LeaderEpochEntry], start_offset: int) -> tuple[LeaderEpochEntry, ...]:
    """Returns the leader epochs from `start_offset` on. The one that covers it begins there."""
    covering = [LeaderEpochEntry(one.epoch, start_offset) for one in leader_epochs if one.start_offset <= start_offset]
    return (*covering[-1:], *(one for one in leader_epochs if one.start_offset > start_offset))
