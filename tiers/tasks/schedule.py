"""`Schedule`: which partition's work begins next. A step costs the logarithm of the number of partitions."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class Schedule(Generic[T]):
    """The times at which kinds of work of several items are to be looked at: one time for each kind and item."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._heaps: dict[str, list[tuple[int, int, T]]] = {kind: [] for kind in kinds}
        """An entry is out of date if `_at_ms` has another time for its item, or none."""
        self._at_ms: dict[str, dict[T, int]] = {kind: {} for kind in kinds}
        self._numbers = count()
        """Of two entries of one time, the earlier one comes first, and items are not compared."""

    def put(self, kind: str, item: T, at_ms: int) -> None:
        """Replaces the time of the item's work of this kind."""
        if self._at_ms[kind].get(item) != at_ms:
            self._at_ms[kind][item] = at_ms
            heapq.heappush(self._heaps[kind], (at_ms, next(self._numbers), item))

    def drop(self, item: T) -> None:
        """Removes all times of the item."""
        for times in self._at_ms.values():
            times.pop(item, None)

    def first_ms(self, kinds: Collection[str]) -> int | None:
        """Returns the earliest time of work of these kinds; None without any."""
        firsts = [first for kind in kinds if (first := self._first(kind)) is not None]
        return min(firsts)[0] if firsts else None

    def pop(self, kinds: Collection[str], now_ms: int) -> tuple[str, T] | None:
        """Removes and returns the earliest work of these kinds whose time has come; None without any."""
        firsts = [(*first, kind) for kind in kinds if (first := self._first(kind)) is not None]
        if not firsts or min(firsts)[0] > now_ms:
            return None
        *_, kind = min(firsts)
        _, _, item = heapq.heappop(self._heaps[kind])
        del self._at_ms[kind][item]
        return kind, item

    def _first(self, kind: str) -> tuple[int, int] | None:
        heap, times = self._heaps[kind], self._at_ms[kind]
        while heap and times.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][:2] if heap else None
