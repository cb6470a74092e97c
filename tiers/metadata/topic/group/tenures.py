"""`Tenures` keeps the tenure of each metadata partition that this process owns, or waits to own again.

A tenure goes on when the group assigns the partition to the same member in the same generation or in the next one: no
other member had an assignment in between. If this member has missed a generation, another one may have owned the
partition in it, so the tenure ends. It also ends when the process has not owned the partition for `AWAIT_MS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from tiers.metadata.tenure import Tenure
from tiers.metadata.topic.group.membership import Assignment
from tiers.metadata.topic.metadata_producer import GroupMember

AWAIT_MS = 30_000
"""How long work waits for the ownership. A rebalance with a dead member takes about 12 s, and a takeover some more."""


@dataclass(slots=True)
class _Held:
    tenure: Tenure
    member: GroupMember
    owned_at_ms: int


class Tenures:
    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._held: dict[int, _Held] = {}
        self._numbers = count()

    def assigned(self, assignment: Assignment) -> None:
        """Ends the tenures of the partitions that others own now, or may have owned since."""
        member = assignment.member
        for number, held in list(self._held.items()):
            is_next = 0 <= member.generation_id - held.member.generation_id <= 1
            if (
                number in assignment.metadata_partitions
                and is_next
                and member.member_id == held.member.member_id
                and member.group_id == held.member.group_id
            ):
                held.member = member
            else:
                del self._held[number]

    def owned(self, number: int, member: GroupMember) -> Tenure:
        """Returns the tenure of a partition that this process owns now. It begins if there is none.

        The time of the last call does not matter: while this process owns the partition, no other one does."""
        held = self._held.get(number)
        if held is None:
            held = self._held[number] = _Held(Tenure(number, next(self._numbers)), member, 0)
        held.owned_at_ms = self._clock_ms()
        return held.tenure

    def awaited(self, number: int) -> Tenure | None:
        """Returns the tenure of a partition that this process waits to own again; None: the tenure has ended."""
        held = self._held.get(number)
        if held is not None and self._is_over(held):
            del self._held[number]
            return None
        return None if held is None else held.tenure

    def _is_over(self, held: _Held) -> bool:
        return self._clock_ms() - held.owned_at_ms > AWAIT_MS
