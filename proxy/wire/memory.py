"""Limits the memory of all connections for answers (`HoldBudget`) and for large messages (`MessageBudget`).

A client would otherwise choose the size of an answer that is held. A grant of `HoldBudget` covers one answer, from
before it is built until its last byte has left. While the client does not read, the grant lasts. So clients that read
slowly hold much memory for a long time, and three rules keep it for the others:

* the cap: one connection never holds more than 1/32 of the total, whatever it asks for;
* the share: a grant is at most 1/8 of the memory that is free. 24 connections can hold their whole cap before that
  lowers a grant. If there are more, each new grant is smaller than the ones before it. A connection that comes back
  gets what the others leave, so n connections that all read end up with equal grants;
* the floor: the first answer of a connection gets 256 KiB, even if no memory is free.

A large message that is held or decoded as a whole cannot be cut as an answer with records can: it is admitted as a
whole, or it waits. Small messages, up to `FLOOR_BYTES`, do not ask for memory. A connection has one large message at a
time. The large messages share the total of `MessageBudget`, and are admitted in their order. A message above an eighth
of the total is huge. One huge message at a time is admitted, beside the total. So a huge message holds up the other
huge ones alone.
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

_CAPS: Final = 32
_SHARES: Final = 8
DECODED_FACTOR: Final = 25
"""How much more memory a decoded message takes than its bytes. Those of short names and small entries take most."""
_HUGE_SHARE: Final = 8

Again = Callable[[], None]


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


class MessageGrant:
    """The memory for one message of `owner`, from `since_s` on."""

    __slots__ = ("_budget", "_owner", "since_s", "size_bytes")

    def __init__(self, budget: MessageBudget, owner: int, since_s: float) -> None:
        self.since_s = since_s
        self.size_bytes = 0
        self._budget = budget
        self._owner = owner

    def resize(self, size_bytes: int) -> None:
        """Changes the size of the message. The memory that this frees is for the messages that wait."""
        self._budget.move(self._owner, self.size_bytes, size_bytes)
        self.size_bytes = size_bytes

    def release(self) -> None:
        """Frees the memory. Further calls have no effect."""
        if self.size_bytes:
            self.resize(0)


class MessageBudget:
    """The owners are the connections, by the ids of their objects."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._huge_bytes = max(FLOOR_BYTES, total_bytes // _HUGE_SHARE)
        self._used_bytes = {False: 0, True: 0}
        """The memory of the usual messages, and that of the huge one."""
        self._grants: dict[int, MessageGrant] = {}
        self._waiting: dict[bool, OrderedDict[int, Again]] = {False: OrderedDict(), True: OrderedDict()}
        """What to call when it is an owner's turn, in the order of the turns, for usual and for huge messages."""
        self._behind_own: dict[int, Again] = {}
        """What to call when an owner's message is gone."""
        self._admitting: int | None = None
        """The owner whose turn it is."""

    @property
    def reserved_bytes(self) -> int:
        return sum(self._used_bytes.values())

    @property
    def has_waiting(self) -> bool:
        """Whether a message waits for the memory of others."""
        return any(self._waiting.values())

    def held(self, owner: int) -> MessageGrant | None:
        return self._grants.get(owner)

    def admit(self, owner: int, size_bytes: int, again: Again) -> MessageGrant | None:
        """Returns a grant. None: the message must wait, and `again` is called when it is its turn."""
        if owner in self._grants:
            self._behind_own[owner] = again
            return None
        is_huge = size_bytes > self._huge_bytes
        used_bytes, waiting = self._used_bytes[is_huge], self._waiting[is_huge]
        fits = not used_bytes or (not is_huge and used_bytes + size_bytes <= self._total_bytes)
        if not fits or (waiting and self._admitting != owner):
            waiting.setdefault(owner, again)
            return None
        return self.charge(owner, size_bytes)

    def charge(self, owner: int, size_bytes: int) -> MessageGrant:
        """Returns a grant for a message that is in memory already, also above the total. Others wait then."""
        for waiting in self._waiting.values():
            waiting.pop(owner, None)
        grant = self._grants[owner] = MessageGrant(self, owner, asyncio.get_running_loop().time())
        grant.resize(size_bytes)
        return grant

    def forget(self, owner: int) -> None:
        """Ends the wait of a connection that has ended."""
        for waiting in (*self._waiting.values(), self._behind_own):
            waiting.pop(owner, None)

    def move(self, owner: int, old_bytes: int, new_bytes: int) -> None:
        """Takes the new size of an owner's message."""
        self._used_bytes[old_bytes > self._huge_bytes] -= old_bytes
        self._used_bytes[new_bytes > self._huge_bytes] += new_bytes
        call_soon = asyncio.get_running_loop().call_soon
        if not new_bytes:
            self._grants.pop(owner, None)
            if again := self._behind_own.pop(owner, None):
                call_soon(again)
        if new_bytes < old_bytes and self.has_waiting:
            call_soon(self._admit_waiting)

    def _admit_waiting(self) -> None:
        for waiting in self._waiting.values():
            while waiting:
                self._admitting, again = waiting.popitem(last=False)
                again()
                if self._admitting in waiting:  # the free memory is not enough
                    waiting.move_to_end(self._admitting, last=False)
                    break
        self._admitting = None
