"""How many clients may be connected, in total and from one address. A TLS handshake counts: it costs the most."""

from __future__ import annotations

from collections import Counter


class Admission:
    """A place among the connections, given back once."""

    __slots__ = ("_address", "_admissions")

    def __init__(self, admissions: Admissions, address: str) -> None:
        self._admissions: Admissions | None = admissions
        self._address = address

    def give_back(self) -> None:
        """Safe to call twice."""
        admissions, self._admissions = self._admissions, None
        if admissions is not None:
            admissions.give_back(self._address)


class Admissions:
    """0: no limit."""

    def __init__(self, max_connections: int, max_connections_per_address: int) -> None:
        self._max = max_connections
        self._max_per_address = max_connections_per_address
        self._total = 0
        self._by_address: Counter[str] = Counter()

    def admit(self, address: str) -> Admission | str:
        """The name of the limit that is reached, or a place."""
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
    """The peer's IP address; all whose address is not known any more count as one."""
    return str(peername[0]) if isinstance(peername, tuple) else ""
