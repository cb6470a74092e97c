"""`HoldBudget`: limits the memory of all connections for held answers, whose size a client would otherwise choose.

A grant covers one answer, from before it is built until its last byte has left. While the client does not read, the
grant lasts. So clients that read slowly hold much memory for a long time, and three rules keep it for the others:

* the cap: one connection never holds more than 1/32 of the total, whatever it asks for;
* the share: a grant is at most 1/8 of the memory that is free. 24 connections can hold their whole cap before that
  lowers a grant. If there are more, each new grant is smaller than the ones before it. A connection that comes back
  gets what the others leave, so n connections that all read end up with equal grants;
* the floor: the first answer of a connection gets 256 KiB, even if no memory is free.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

KIB: Final = 1024

OVERSHOOT_BYTES: Final = 1024 * KIB
"""One batch may exceed any limit (KIP-74). The default of message.max.bytes is about this size."""
FLOOR_BYTES: Final = 256 * KIB

_CAPS: Final = 32
_SHARES: Final = 8


class Grant:
    """Memory for one answer. The answer may have `max_bytes`, and one batch beyond them.

    With a `max_bytes` of 0, the connection holds its cap already. Then no record may be read ahead of the answer's
    turn."""

    __slots__ = ("_budget", "_connection_id", "_is_released", "_reserved_bytes", "max_bytes")

    def __init__(self, budget: HoldBudget, connection_id: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._budget = budget
        self._connection_id = connection_id
        self._is_released = False
        self._reserved_bytes = 0
        self.resize(max_bytes + OVERSHOOT_BYTES if max_bytes else 0)

    def resize(self, size_bytes: int) -> None:
        """Adjusts the reservation to the size of the complete answer. Does nothing after `release`."""
        if self._is_released:
            return
        self._budget.reserve(self._connection_id, size_bytes - self._reserved_bytes)
        self._reserved_bytes = size_bytes

    def keep(self, size_bytes: int) -> Grant:
        """Returns a grant of the same connection for memory that outlives this answer. It allows no further answer."""
        kept = Grant(self._budget, self._connection_id, 0)
        kept.resize(size_bytes)
        return kept

    def release(self) -> None:
        """Frees the memory. Further calls have no effect."""
        self.resize(0)
        self._is_released = True


class HoldBudget:
    def __init__(self, total_bytes: int) -> None:
        self.cap_bytes = max(FLOOR_BYTES, total_bytes // _CAPS)
        self.reserved_bytes = 0
        self._total_bytes = total_bytes
        self._by_connection: Counter[int] = Counter()

    @property
    def holding_count(self) -> int:
        """The number of connections that hold memory."""
        return len(self._by_connection)

    def grant(self, connection_id: int, wanted_bytes: int) -> Grant:
        share_bytes = max(FLOOR_BYTES, (self._total_bytes - self.reserved_bytes) // _SHARES)
        room_bytes = self.cap_bytes - self._by_connection[connection_id]
        max_bytes = 0 if room_bytes <= 0 else max(1, min(wanted_bytes, share_bytes, room_bytes))
        return Grant(self, connection_id, max_bytes)

    def reserve(self, connection_id: int, change_bytes: int) -> None:
        """Adds `change_bytes`, which may be negative, to what the connection holds."""
        self.reserved_bytes += change_bytes
        self._by_connection[connection_id] += change_bytes
        if not self._by_connection[connection_id]:
            del self._by_connection[connection_id]
