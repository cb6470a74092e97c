"""`FairOrder`: the order in which messages are decoded, so that a large one keeps no small one waiting.

The order is that in which the messages would end if all of them were decoded at once, each at an equal rate (fair
queueing). So a small message overtakes large ones that arrived before it. A large one still has its turn: the small
ones that arrive later end later and later.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

T = TypeVar("T")


class FairOrder(Generic[T]):
    """The messages that wait. The caller takes one at a time, and reports it when it is decoded."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, int, T]] = []
        self._numbers = itertools.count()
        self._shared_bytes = 0.0
        """The bytes that each message would have had decoded since the beginning, if all had an equal rate."""

    def add(self, size_bytes: int, message: T) -> None:
        """Adds a message. Of two that would end at the same time, the one that was added first comes first."""
        ends_at = self._shared_bytes + size_bytes
        heapq.heappush(self._waiting, (ends_at, next(self._numbers), size_bytes, message))

    def take(self) -> tuple[int, T]:
        """Removes the next message. Returns its size and itself. Raises `IndexError` if no message waits."""
        _, _, size_bytes, message = heapq.heappop(self._waiting)
        return size_bytes, message

    def decoded(self, size_bytes: int) -> None:
        """Notes that a message was decoded. It was not if its client went away meanwhile."""
        self._shared_bytes += size_bytes / (1 + len(self._waiting))
