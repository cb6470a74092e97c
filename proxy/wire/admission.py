"""Limits the number of client connections, in total and per IP address, and the time until a client shows who it is.

A connection counts from its accept. It is *unproven* until the broker has authenticated the client, or, if the brokers
do not ask for SASL, until its first complete request has arrived. An unproven connection ends after a time, and gives
way to a newer connection when a limit is reached. So silent connections never keep clients out. Unproven connections
have a limit per address of their own, which clients behind one load balancer do not reach.

A connection that gives way is chosen at random. If it were the oldest one, and more clients came at once than the limit
lets in, then each would lose its place before it has authenticated, and none would ever get in.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from enum import StrEnum
from ipaddress import IPv6Address, IPv6Network
from random import Random


class Limit(StrEnum):
    """The names of the limits."""

    CONNECTIONS = "limits.max.connections"
    PER_ADDRESS = "limits.max.total.connections.per.address"
    UNPROVEN_PER_ADDRESS = "limits.max.unauthenticated.connections.per.address"
    SETUP_TIMEOUT = "setup timeout"

    @property
    def cause(self) -> str:
        """The cause that the metrics have for an unproven connection that ends because of this limit."""
        return "setup_timeout" if self == Limit.SETUP_TIMEOUT else "gave_way"

    @property
    def said(self) -> str:
        """Why an unproven connection ends, for the log."""
        if self == Limit.SETUP_TIMEOUT:
            return "the client has not shown who it is in time"
        return f"the client has not shown who it is, and a newer connection takes its place at {self}"


GiveWay = Callable[[Limit], None]
"""Ends the connection, because of a limit. The place is free already."""


class Admission:
    """The place of one admitted connection."""

    __slots__ = ("_admissions", "_deadline", "address", "give_way")

    def __init__(self, admissions: Admissions, address: str, give_way: GiveWay) -> None:
        self.address = address
        self.give_way = give_way
        """Called at most once, while the connection is unproven. The next owner of the place replaces it."""
        self._admissions: Admissions | None = admissions
        self._deadline = asyncio.get_running_loop().call_later(
            admissions.setup_timeout_ms / 1000, self.end, Limit.SETUP_TIMEOUT
        )

    def prove(self) -> None:
        """The client has shown who it is. From now on, the connection stays until one side ends it."""
        self._deadline.cancel()
        if self._admissions is not None:
            self._admissions.prove(self)

    def move(self, address: str) -> Limit | None:
        """Counts the connection for another address, that of the client behind a load balancer.

        Returns the limit that this address has reached, or None. After a limit, the place is free."""
        admissions = self._admissions
        if admissions is None:
            return Limit.SETUP_TIMEOUT
        admissions.remove(self)
        address = self.address = counted_as(address)
        limit = admissions.make_room(address)
        if limit is not None:
            self._admissions = None
            self._deadline.cancel()
            return limit
        admissions.add(self)
        return None

    def give_back(self) -> None:
        """Frees the place. Further calls have no effect."""
        self._deadline.cancel()
        admissions, self._admissions = self._admissions, None
        if admissions is not None:
            admissions.remove(self)

    def end(self, limit: Limit) -> None:
        self.give_back()
        self.give_way(limit)


class _Unproven:
    """A set of which one member can be chosen at random, in constant time."""

    def __init__(self) -> None:
        self._members: list[Admission] = []
        self._places: dict[Admission, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def add(self, admission: Admission) -> None:
        self._places[admission] = len(self._members)
        self._members.append(admission)

    def discard(self, admission: Admission) -> None:
        place = self._places.pop(admission, None)
        if place is None:
            return
        last = self._members.pop()
        if last is not admission:
            self._members[place] = last
            self._places[last] = place

    def one(self, random: Random) -> Admission:
        return random.choice(self._members)


_NONE = _Unproven()


class Admissions:
    """Counts the open connections. A limit of 0 means no limit."""

    def __init__(
        self,
        max_connections: int,
        max_per_address: int,
        max_unproven_per_address: int,
        setup_timeout_ms: int,
        random: Random | None = None,
    ) -> None:
        self.change_limits(max_connections, max_per_address, max_unproven_per_address, setup_timeout_ms)
        self._total = 0
        self._by_address: Counter[str] = Counter()
        self._random = random or Random()
        self._unproven = _Unproven()
        self._unproven_by_address: defaultdict[str, _Unproven] = defaultdict(_Unproven)

    def change_limits(
        self, max_connections: int, max_per_address: int, max_unproven_per_address: int, setup_timeout_ms: int
    ) -> None:
        """Replaces the limits. No open connection ends because of them."""
        self.setup_timeout_ms = setup_timeout_ms
        self._max = max_connections
        self._max_per_address = max_per_address
        self._max_unproven_per_address = max_unproven_per_address

    def admit(self, address: str, give_way: GiveWay) -> Admission | Limit:
        """Admits a connection and returns its place, or returns the limit that is reached.

        At a limit, one of the unproven connections that count for it gives way."""
        address = counted_as(address)
        limit = self.make_room(address)
        if limit is not None:
            return limit
        admission = Admission(self, address, give_way)
        self.add(admission)
        return admission

    def make_room(self, address: str) -> Limit | None:
        """Returns the limit that does not let another connection of this address in."""
        of_address = self._unproven_by_address.get(address, _NONE)
        if self._max_unproven_per_address and len(of_address) >= self._max_unproven_per_address:
            of_address.one(self._random).end(Limit.UNPROVEN_PER_ADDRESS)
        if self._max_per_address and self._by_address[address] >= self._max_per_address:
            if not of_address:
                return Limit.PER_ADDRESS
            of_address.one(self._random).end(Limit.PER_ADDRESS)
        if self._max and self._total >= self._max:
            if not self._unproven:
                return Limit.CONNECTIONS
            self._unproven.one(self._random).end(Limit.CONNECTIONS)
        return None

    def add(self, admission: Admission) -> None:
        self._total += 1
        self._by_address[admission.address] += 1
        self._unproven.add(admission)
        self._unproven_by_address[admission.address].add(admission)

    def prove(self, admission: Admission) -> None:
        self._unproven.discard(admission)
        of_address = self._unproven_by_address.get(admission.address)
        if of_address is not None:
            of_address.discard(admission)
            if not of_address:
                del self._unproven_by_address[admission.address]

    def remove(self, admission: Admission) -> None:
        self.prove(admission)
        self._total -= 1
        self._by_address[admission.address] -= 1
        if not self._by_address[admission.address]:
            del self._by_address[admission.address]


def counted_as(address: str) -> str:
    """Returns what the limits per address count. One client has a whole IPv6 network of 64 bits."""
    if ":" not in address:
        return address
    ip = IPv6Address(address.partition("%")[0])
    return str(ip.ipv4_mapped or IPv6Network((int(ip), 64), strict=False))


def address_of(peername: object) -> str:
    """Returns the peer's IP address. All peers whose address is no longer known share the empty address."""
    return str(peername[0]) if isinstance(peername, tuple) else ""
