"""Which leader epochs begin in a hole of the log, and with the batch after it."""

from __future__ import annotations

import pytest

from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.leader_epochs import EpochHole, epochs_begun

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
