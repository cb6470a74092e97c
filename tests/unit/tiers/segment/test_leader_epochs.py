"""Which leader epochs begin in a hole of the log, and with the batch after it."""

from __future__ import annotations

import pytest

from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.leader_epochs import EpochHole, UnknownEpochStartError, check_named, clipped, epochs_begun


def entries(*pairs: tuple[int, int]) -> list[LeaderEpochEntry]:
    return [LeaderEpochEntry(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("named", "begun"),
    [
        ([], [(5, 200)]),
        ([(5, 150)], [(5, 150)]),
        ([(5, 10)], [(5, 10)]),
        ([(5, 200)], [(5, 200)]),
        ([(4, 120), (5, 150)], [(4, 120), (5, 150)]),
        ([(4, 120)], [(4, 120), (5, 200)]),
        ([(2, 20), (3, 30), (5, 150), (6, 160)], [(5, 150)]),
        ([(4, 9), (5, 201)], [(5, 200)]),
    ],
    ids=[
        "nothing is named",
        "it begins in the hole",
        "it begins with the hole",
        "it begins after the hole",
        "two begin in the hole",
        "another one begins in the hole",
        "known and later epochs are ignored",
        "starts outside of the hole are ignored",
    ],
)
def test_the_epochs_that_begin_in_a_hole_are_the_named_ones(
    named: list[tuple[int, int]], begun: list[tuple[int, int]]
) -> None:
    assert epochs_begun(EpochHole(3, 10, 5, 200), entries(*named)) == entries(*begun)


def test_without_a_hole_an_epoch_begins_with_its_batch() -> None:
    assert epochs_begun(EpochHole(3, 10, 5, 10), entries((4, 10))) == entries((5, 10))
    assert epochs_begun(EpochHole(3, 10, 5, 8), entries((5, 9))) == entries((5, 8))


def test_the_first_epoch_that_is_known_begins_with_the_hole_at_the_latest() -> None:
    assert epochs_begun(EpochHole(-1, 10, 5, 200), entries((4, 120), (5, 150))) == entries((4, 10), (5, 150))
    assert epochs_begun(EpochHole(-1, 10, 5, 200), ()) == entries((5, 10))
    assert epochs_begun(EpochHole(-1, 10, 5, 8), ()) == entries((5, 8))


def test_an_epoch_that_is_not_named_is_told() -> None:
    hole = EpochHole(3, 10, 5, 200)
    check_named(hole, entries((5, 10)))
    with pytest.raises(UnknownEpochStartError, match="leader epoch 5, which is between offsets 10 and 200") as raised:
        check_named(hole, entries((4, 10)))
    assert raised.value.hole == hole


def test_the_epochs_of_a_segment_are_clipped_to_its_start() -> None:
    known = entries((0, 0), (2, 50), (5, 150))
    assert clipped(known, 0) == tuple(known)
    assert clipped(known, 49) == tuple(entries((0, 49), (2, 50), (5, 150)))
    assert clipped(known, 50) == tuple(entries((2, 50), (5, 150)))
    assert clipped(known, 151) == tuple(entries((5, 151)))
