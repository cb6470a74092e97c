"""Places for connections: taken up to either limit, and released once."""

from __future__ import annotations

from proxy.wire.admission import Admission, Admissions


def taken(admissions: Admissions, address: str) -> Admission:
    admitted = admissions.admit(address)
    assert isinstance(admitted, Admission)
    return admitted


def test_a_limit_in_total_and_one_per_address() -> None:
    admissions = Admissions(3, 2)
    first, _, _ = taken(admissions, "a"), taken(admissions, "a"), taken(admissions, "b")
    assert admissions.admit("c") == "limits.max.connections"
    first.give_back()
    taken(admissions, "a").give_back()
    taken(admissions, "b")
    assert admissions.admit("a") == "limits.max.connections"


def test_one_address_leaves_the_others_their_places() -> None:
    admissions = Admissions(0, 1)
    taken(admissions, "a")
    assert admissions.admit("a") == "limits.max.connections.per.address"
    taken(admissions, "b")


def test_a_place_is_released_once() -> None:
    admissions = Admissions(2, 0)
    first = taken(admissions, "a")
    taken(admissions, "a")
    first.give_back()
    first.give_back()
    taken(admissions, "a")
    assert admissions.admit("a") == "limits.max.connections"
