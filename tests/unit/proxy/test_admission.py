"""Places for connections: taken up to every limit, released once, and taken from unproven connections."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from proxy.wire.admission import Admission, Admissions, Limit, counted_as

NEVER_MS = 3_600_000


class Places:
    """Admissions, and the places that gave way, in order."""

    def __init__(self, total: int = 0, per_address: int = 0, unproven_per_address: int = 0) -> None:
        self.admissions = Admissions(total, per_address, unproven_per_address, NEVER_MS, Random(1))
        self.gave_way: list[tuple[str, Limit]] = []

    def ask(self, name: str, address: str = "a") -> Admission | Limit:
        return self.admissions.admit(address, lambda limit: self.gave_way.append((name, limit)))

    def take(self, name: str, address: str = "a", *, is_proven: bool = False) -> Admission:
        admitted = self.ask(name, address)
        assert isinstance(admitted, Admission)
        if is_proven:
            admitted.prove()
        return admitted


async def test_a_limit_in_total_and_one_per_address() -> None:
    places = Places(total=3, per_address=2)
    first = places.take("1", "a", is_proven=True)
    places.take("2", "a", is_proven=True)
    assert places.ask("3", "a") == Limit.PER_ADDRESS
    places.take("4", "b", is_proven=True)
    assert places.ask("5", "c") == Limit.CONNECTIONS
    first.give_back()
    places.take("6", "c", is_proven=True)
    assert places.gave_way == []


async def test_a_place_is_released_once() -> None:
    places = Places(total=2)
    first = places.take("1", is_proven=True)
    places.take("2", is_proven=True)
    first.give_back()
    first.give_back()
    places.take("3", is_proven=True)
    assert places.ask("4") == Limit.CONNECTIONS


async def test_an_unproven_connection_gives_way_and_no_other() -> None:
    places = Places(total=3)
    places.take("1", is_proven=True)
    for name in ("2", "3", "4", "5"):
        places.take(name)
    assert [limit for _, limit in places.gave_way] == [Limit.CONNECTIONS] * 2
    assert {name for name, _ in places.gave_way} < {"2", "3", "4", "5"}


async def test_some_clients_of_a_burst_get_in() -> None:
    """Each client needs its place until 15 more have come, and the limit of unproven connections is 10."""
    places = Places(unproven_per_address=10)
    admitted = [places.take(str(number)) for number in range(15)]
    for number in range(15, 300):
        admitted.append(places.take(str(number)))
        if str(number - 15) not in dict(places.gave_way):
            admitted[number - 15].prove()
    assert len(places.gave_way) < 300 - 10


async def test_an_address_gives_way_to_itself() -> None:
    places = Places(per_address=2, unproven_per_address=1)
    places.take("other", "b")
    places.take("1", "a")
    places.take("2", "a")
    assert places.gave_way == [("1", Limit.UNPROVEN_PER_ADDRESS)]
    places.take("3", "a").prove()
    places.take("4", "a")
    places.take("5", "a").prove()
    assert places.gave_way[1:] == [("2", Limit.UNPROVEN_PER_ADDRESS), ("4", Limit.UNPROVEN_PER_ADDRESS)]
    assert places.ask("6", "a") == Limit.PER_ADDRESS


async def test_a_connection_moves_to_the_address_of_its_client() -> None:
    places = Places(per_address=1)
    places.take("1", "client", is_proven=True)
    moved = places.take("2", "balancer")
    assert moved.move("other client") is None
    places.take("3", "balancer")
    assert places.gave_way == []
    late = places.take("4", "balancer")
    assert places.gave_way == [("3", Limit.PER_ADDRESS)]
    assert late.move("client") == Limit.PER_ADDRESS
    places.take("5", "balancer")
    assert places.gave_way == [("3", Limit.PER_ADDRESS)]


async def test_an_unproven_connection_has_a_deadline() -> None:
    ended: list[str] = []
    over = asyncio.Event()
    admissions = Admissions(0, 0, 0, setup_timeout_ms=1)

    def admit(name: str) -> Admission:
        def give_way(limit: Limit) -> None:
            assert limit == Limit.SETUP_TIMEOUT
            ended.append(name)
            over.set()

        admitted = admissions.admit("a", give_way)
        assert isinstance(admitted, Admission)
        return admitted

    admit("proven").prove()
    admit("closed").give_back()
    admit("silent")
    await over.wait()
    assert ended == ["silent"]


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("", ""),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:0:0:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
    ],
)
def test_an_ipv6_network_counts_as_one_address(address: str, counted: str) -> None:
    assert counted_as(address) == counted


async def test_addresses_of_one_ipv6_network_share_a_limit() -> None:
    places = Places(per_address=1)
    places.take("1", "2001:db8::1", is_proven=True)
    assert places.ask("2", "2001:db8::2") == Limit.PER_ADDRESS
    places.take("3", "192.0.2.1").give_back()
    moved = places.take("4", "192.0.2.1")
    assert moved.move("2001:db8::3") == Limit.PER_ADDRESS
