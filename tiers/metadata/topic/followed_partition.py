"""`FollowedPartition`: how far one metadata partition was read, as of when, and why it may not be believed.

The topic keeps a tombstone for `delete.retention.ms`. The records behind the position are complete if it was the end of
the partition less than half of that time ago. Otherwise the follower reads the partition again from its start. Two
clocks measure the time, and the longer measure counts: the monotonic clock counts a suspended process, and the wall
clock one that a hypervisor stopped. If the wall clock was set back, the age is unknown.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tiers.broker.client import Leader, Moment
from tiers.metadata.state.replay import UnknownRecord
from tiers.metadata.state.writer import age_since, is_too_old
from tiers.model.log_start import OffsetAndEpoch

logger = logging.getLogger(__name__)

ASK_AFTER_MS = 10_000
"""A position that was the end of its partition within this time is not too old, since the topic keeps tombstones longer
(`MIN_DELETE_RETENTION_MS`). For an older one, the follower asks how long the topic keeps them now."""
NO_LEADER = Leader(-1, -1)
"""A metadata partition without a leader has this node id. Its leader epoch may be known."""


@dataclass(slots=True, eq=False)
class FollowedPartition:
    number: int
    position: OffsetAndEpoch
    """The next offset to read, and the leader epoch of the last batch before it."""
    reached: OffsetAndEpoch
    """Behind the last record that was ever read."""
    diverged: str | None
    """Why the log has another history than the one that was read. The follower reads it no more."""
    is_divergence_saved: bool
    complete_as_of: Moment | None = None
    """When the position was the end of the partition."""
    lost: str | None = None
    """Why the log lacks records that it may have again."""
    failure: str | None = None
    """Why records cannot be read or replayed. The follower tries again."""
    unknown: str | None = None
    """Which record of a later release ended the reading. The follower reads no more."""
    error_code: int = 0
    """The error of the last Fetch."""
    leader: Leader = NO_LEADER
    """The last known leader."""
    confirmed_at_ms: int | None = None
    """As of when (monotonic) another broker named the leader."""
    believed: Leader | None = None
    """The leader whose log continues the one that was read."""
    fresh_at_ms: int | None = None
    """As of when (monotonic) the partition was read to its high watermark."""
    to_clear: str | None = None
    """Why the state must forget the partition before anything is replayed."""

    @property
    def furthest(self) -> OffsetAndEpoch:
        return max(self.position, self.reached)

    @property
    def trouble(self) -> str | None:
        """Returns why the partition is not read to its end although its leader answers."""
        return self.diverged or self.lost or self.failure or self.unknown

    def holds_as_of(self, leader: Leader, at_ms: int) -> int | None:
        """Returns as of when the answer to a request that was sent to `leader` at `at_ms` is complete.

        None: the answer may be incomplete."""
        if self.confirmed_at_ms is None or self.leader != leader:
            return None
        return min(at_ms, self.confirmed_at_ms)

    def read_to_end(self, as_of_ms: int, asked_at: Moment) -> None:
        """Records that the position was the end of the partition at `as_of_ms` (monotonic), as an answer says.

        `asked_at` is when the answer was asked for, or later. A clock that is set between question and answer makes the
        partition look older, and never younger."""
        self.fresh_at_ms = as_of_ms
        self.complete_as_of = Moment(as_of_ms, asked_at.wall_ms - (asked_at.monotonic_ms - as_of_ms))

    def is_too_old(self, now: Moment, max_age_ms: int) -> bool:
        """Returns whether the records behind the position may lack tombstones."""
        if self.complete_as_of is None:
            return True
        wall_age_ms = age_since(self.complete_as_of.wall_ms, now.wall_ms)
        age_ms = None if wall_age_ms is None else max(wall_age_ms, now.monotonic_ms - self.complete_as_of.monotonic_ms)
        return is_too_old(age_ms, max_age_ms)

    def fail(self, error: Exception) -> None:
        """Records that the partition has records that cannot be read or replayed."""
        self.fresh_at_ms = None
        reason = f"records of metadata partition {self.number} cannot be read: {error!r}"
        if self.failure != reason:
            logger.error("the remote log metadata of one metadata partition is not followed", extra={"reason": reason})
        self.failure = reason

    def was_read(self, unknown: UnknownRecord | None) -> None:
        """Records that the partition was read, up to an unknown record if there is one."""
        if self.failure is not None:
            self.failure = None
            logger.warning("a metadata partition is read again", extra={"metadata_partition": self.number})
        if unknown is not None:
            self.fresh_at_ms = None
            self.unknown = (
                f"metadata partition {self.number} has records of a later release from offset {unknown.offset} on:"
                f" upgrade this process ({unknown.what})"
            )
            logger.error("the remote log metadata is not followed", extra={"reason": self.unknown})

    def forget(self, reason: str) -> None:
        """Forgets the position, before the state is cleared.

        Otherwise records that the state does not have any more would look as if they were never written."""
        self.to_clear = reason
        self.reached, self.position = self.furthest, OffsetAndEpoch(0, -1)
        self.failure = self.unknown = self.fresh_at_ms = None
