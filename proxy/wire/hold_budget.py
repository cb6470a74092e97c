"""`HoldBudget`: limits the memory of all connections for messages whose size a client would otherwise choose.

A grant for an answer covers it from before it is built until its last byte has left. While the client does not read,
the grant lasts. So clients that read slowly hold much memory for a long time, and three rules keep it for the others:

* the cap: one connection never holds more than 1/32 of the total, whatever it asks for;
* the share: a grant is at most 1/8 of the memory that is free. 24 connections can hold their whole cap before that
  lowers a grant. If there are more, each new grant is smaller than the ones before it. A connection that comes back
  gets what the others leave, so n connections that all read end up with equal grants;
* the floor: the first answer of a connection gets 256 KiB, even if no memory is free.

A message that is decoded cannot be cut as an answer with records can: it is admitted as a whole, or it waits. What a
connection holds up to the floor is always admitted, and takes no memory from the others. The messages above it are
admitted in their order.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

KIB: Final = 1024

OVERSHOOT_BYTES: Final = 1024 * KIB
"""One batch may exceed any limit (KIP-74). The default of message.max.bytes is about this size."""
FLOOR_BYTES: Final = 256 * KIB

DECODED_FACTOR: Final = 25
"""How much more memory a decoded request takes than its bytes. Those of short names and small entries take most.

A Fetch counts as its bytes at first: it may wait for records for long, and is decoded only if it touches the remote
tier (`Exchange.count_decoded`)."""

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
        self._above_floors_bytes = 0
        self._total_bytes = total_bytes
        self._by_connection: Counter[int] = Counter()
        self._waiting: OrderedDict[int, Callable[[], None]] = OrderedDict()
        """What to call when it is a connection's turn, in the order of the turns."""
        self._admitting: int | None = None
        """The connection whose turn it is."""

    @property
    def holding_count(self) -> int:
        """The number of connections that hold memory."""
        return len(self._by_connection)

    @property
    def has_waiting(self) -> bool:
        """Whether a message waits for memory."""
        return bool(self._waiting)

    def holds(self, connection_id: int) -> bool:
        """Whether the connection holds memory."""
        return connection_id in self._by_connection

    def grant(self, connection_id: int, wanted_bytes: int) -> Grant:
        share_bytes = max(FLOOR_BYTES, (self._total_bytes - self.reserved_bytes) // _SHARES)
        room_bytes = self.cap_bytes - self._by_connection[connection_id]
        max_bytes = 0 if room_bytes <= 0 else max(1, min(wanted_bytes, share_bytes, room_bytes))
        return Grant(self, connection_id, max_bytes)

    def admit(self, connection_id: int, size_bytes: int, again: Callable[[], None]) -> Grant | None:
        """Returns a grant for a whole message. None: it must wait.

        If no memory is free, `again` is called when it is the connection's turn. A connection that would exceed its cap
        goes on when it has released its own grants."""
        held_bytes = self._by_connection[connection_id]
        if held_bytes + size_bytes > FLOOR_BYTES:
            if held_bytes and held_bytes + size_bytes > self.cap_bytes:
                return None
            is_next = not self._waiting or self._admitting == connection_id
            more_bytes = held_bytes + size_bytes - max(held_bytes, FLOOR_BYTES)
            fits = not self._above_floors_bytes or self._above_floors_bytes + more_bytes <= self._total_bytes
            if not (is_next and fits):
                self._waiting.setdefault(connection_id, again)
                return None
        self._waiting.pop(connection_id, None)
        grant = Grant(self, connection_id, 0)
        grant.resize(size_bytes)
        return grant

    def forget(self, connection_id: int) -> None:
        """Ends the wait of a connection that has ended."""
        self._waiting.pop(connection_id, None)

    def _admit_waiting(self) -> None:
        while self._waiting:
            self._admitting, again = self._waiting.popitem(last=False)
            again()
            if self._admitting in self._waiting:  # the free memory is not enough
                self._waiting.move_to_end(self._admitting, last=False)
                break
        self._admitting = None

    def reserve(self, connection_id: int, change_bytes: int) -> None:
        """Adds `change_bytes`, which may be negative, to what the connection holds."""
        before_bytes = self._by_connection[connection_id]
        after_bytes = before_bytes + change_bytes
        self.reserved_bytes += change_bytes
        self._above_floors_bytes += max(after_bytes, FLOOR_BYTES) - max(before_bytes, FLOOR_BYTES)
        self._by_connection[connection_id] = after_bytes
        if not self._by_connection[connection_id]:
            del self._by_connection[connection_id]
        if change_bytes < 0 and self._waiting:
            asyncio.get_running_loop().call_soon(self._admit_waiting)
