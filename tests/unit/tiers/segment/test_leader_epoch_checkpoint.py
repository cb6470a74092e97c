from __future__ import annotations

import pytest

from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.leader_epoch_checkpoint import decode_leader_epoch_checkpoint, encode_leader_epoch_checkpoint

ENTRIES = (LeaderEpochEntry(0, 0), LeaderEpochEntry(3, 1500))


def test_the_file_is_kafkas() -> None:
    assert encode_leader_epoch_checkpoint(ENTRIES) == b"0\n2\n0 0\n3 1500\n"
    assert decode_leader_epoch_checkpoint(b"0\n2\n0 0\n3 1500\n") == ENTRIES
    assert decode_leader_epoch_checkpoint(encode_leader_epoch_checkpoint(())) == ()


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"0\n",
        b"1\n0\n",
        b"0\n2\n0 0\n",
        b"0\n1\n0 0\n3 1500\n",
        b"0\n2\n3 0\n0 1500\n",
        b"0\n2\n0 1500\n3 0\n",
        b"0\n1\n0\n",
        b"0\n1\nx y\n",
        b"\xff\n",
    ],
)
def test_anything_else_is_corrupt(damaged: bytes) -> None:
    with pytest.raises(CorruptSegmentError):
        decode_leader_epoch_checkpoint(damaged)
