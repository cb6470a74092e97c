"""Limits the number of client connections, in total and per IP address.

A connection counts from the start of its TLS handshake, because the handshake is its most expensive part.
"""

from __future__ import annotations

from collections import Counter


class Admission:
    """The place of one admitted connection."""

    __slots__ = ("_address", "_admissions")

    def __init__(self, admissions: Admissions, address: str) -> None:
        self._admissions: Admissions | None = admissions
        self._address = address

    def give_back(self) -> None:
        """Frees the place. Further calls have no effect."""
        admissions, self._admissions = self._admissions, None
        if admissions is not None:
            admissions.give_back(self._address)


class Admissions:
    """Counts the open connections. A limit of 0 means no limit."""

    def __init__(self, max_connections: int, max_connections_per_address: int) -> None:
        self._max = max_connections
        self._max_per_address = max_connections_per_address
        self._total = 0
        self._by_address: Counter[str] = Counter()

    def admit(self, address: str) -> Admission | str:
        """Admits a connection and returns its place, or returns the name of the limit that is reached."""
        if self._max and self._total >= self._max:
            return "limits.max.connections"
        if self._max_per_address and self._by_address[address] >= self._max_per_address:
            return "limits.max.connections.per.address"
        self._total += 1
        self._by_address[address] += 1
        return Admission(self, address)

    def give_back(self, address: str) -> None:
        self._total -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def address_of(peername: object) -> str:
    """Returns the peer's IP address. All peers whose address is no longer known share the empty address."""
    return str(peername[0]) if isinstance(peername, tuple) else ""
