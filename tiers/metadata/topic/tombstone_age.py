"""`TombstoneAge` judges whether compaction may have removed tombstones that the follower has not read.

The topic keeps a tombstone for `delete.retention.ms`. So the records behind the follower's position are complete if
the position was the end of the partition less than that time ago; half of it counts. A follower that was cut off for
longer must read the partition again from its start (docs/design.md, "Metadata").

The time is measured by two clocks, and the longer measure counts. The monotonic clock also counts the time in which the
process or the machine was suspended, but not the time in which a hypervisor stopped it. Its wall clock jumps ahead
after that. A wall clock that was set back says nothing, so the age is then unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tiers.metadata.state.writer import age_since, is_too_old

ASK_AFTER_MS = 10_000
"""A position that was the end of its partition within this time is not too old, since the topic keeps tombstones longer
(`MIN_DELETE_RETENTION_MS`). For an older one, the follower asks how long the topic keeps them now."""


class Moment(NamedTuple):
    monotonic_ms: int
    wall_ms: int


class TombstoneAge:
    """`read_at_ms` has the times (wall clock) that the saved state knows, by metadata partition."""

    def __init__(
        self, read_at_ms: Mapping[int, int], clock_ms: Callable[[], int], wall_clock_ms: Callable[[], int]
    ) -> None:
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        now = self.now()
        self._complete_as_of = {
            number: Moment(now.monotonic_ms - (now.wall_ms - at_ms), at_ms) for number, at_ms in read_at_ms.items()
        }

    def now(self) -> Moment:
        return Moment(self._clock_ms(), self._wall_clock_ms())

    def read_to_end(self, number: int, as_of_ms: int, asked_at: Moment) -> None:
        """Records that the position was the end of the partition at `as_of_ms` (monotonic), as an answer tells.

        `asked_at` is when the answer was asked for, or later. A clock that is set between question and answer makes the
        partition look older, and never younger."""
        self._complete_as_of[number] = Moment(as_of_ms, asked_at.wall_ms - (asked_at.monotonic_ms - as_of_ms))

    def begins_again(self, number: int) -> int:
        """Records that the partition is read from its start from now on. Returns the time (wall clock)."""
        self._complete_as_of[number] = self.now()
        return self._complete_as_of[number].wall_ms

    def is_too_old(self, number: int, max_age_ms: int) -> bool:
        """Returns whether the records behind the position may lack tombstones."""
        return is_too_old(self._age_ms(number), max_age_ms)

    def read_at_ms(self) -> dict[int, int]:
        """Returns the times (wall clock) to save."""
        return {number: moment.wall_ms for number, moment in self._complete_as_of.items()}

    def _age_ms(self, number: int) -> int | None:
        as_of, now = self._complete_as_of.get(number), self.now()
        if as_of is None:
            return None
        wall_age_ms = age_since(as_of.wall_ms, now.wall_ms)
        return None if wall_age_ms is None else max(wall_age_ms, now.monotonic_ms - as_of.monotonic_ms)
