"""Which leader epochs begin in a hole of the log, and with the batch after it."""

from __future__ import annotations

import pytest

from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.leader_epochs import EpochHole, UnknownEpochStartError, check_named, clipped, epochs_begun

HOLE = EpochHole(3, 10, 5, 200)
Epochs = list[tuple[int, int]]


def entries(pairs: Epochs) -> list[LeaderEpochEntry]:
    return [LeaderEpochEntry(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("hole", "named", "begun"),
    [
        (HOLE, [], [(5, 200)]),  # nothing is named
        (HOLE, [(5, 150)], [(5, 150)]),
        (HOLE, [(5, 10)], [(5, 10)]),  # it begins with the hole
        (HOLE, [(5, 200)], [(5, 200)]),  # it begins after the hole
        (HOLE, [(4, 120), (5, 150)], [(4, 120), (5, 150)]),
        (HOLE, [(4, 120)], [(4, 120), (5, 200)]),
        (HOLE, [(2, 20), (3, 30), (5, 150), (6, 160)], [(5, 150)]),  # known and later epochs are ignored
        (HOLE, [(4, 9), (5, 201)], [(5, 200)]),  # starts outside of the hole are ignored
        (EpochHole(3, 10, 5, 10), [(4, 10)], [(5, 10)]),  # no hole
        (EpochHole(3, 10, 5, 8), [(5, 9)], [(5, 8)]),
        (EpochHole(-1, 10, 5, 200), [(4, 120), (5, 150)], [(4, 10), (5, 150)]),  # no epoch is known before it
        (EpochHole(-1, 10, 5, 200), [], [(5, 10)]),
        (EpochHole(-1, 10, 5, 8), [], [(5, 8)]),
    ],
)
def test_the_epochs_that_begin_in_a_hole_are_the_named_ones(hole: EpochHole, named: Epochs, begun: Epochs) -> None:
    assert epochs_begun(hole, entries(named)) == entries(begun)


def test_an_epoch_that_is_not_named_is_told() -> None:
    check_named(HOLE, entries([(5, 10)]))
    with pytest.raises(UnknownEpochStartError, match="leader epoch 5, which is between offsets 10 and 200") as raised:
        check_named(HOLE, entries([(4, 10)]))
    assert raised.value.hole == HOLE


@pytest.mark.parametrize(
    ("start", "kept"),
    [
        (0, [(0, 0), (2, 50), (5, 150)]),
        (49, [(0, 49), (2, 50), (5, 150)]),
        (50, [(2, 50), (5, 150)]),
        (151, [(5, 151)]),
    ],
)
def test_the_epochs_of_a_segment_are_clipped_to_its_start(start: int, kept: Epochs) -> None:
    assert clipped(entries([(0, 0), (2, 50), (5, 150)]), start) == tuple(entries(kept))
