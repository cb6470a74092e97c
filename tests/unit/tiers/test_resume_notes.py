"""Resumed verification skips segments that were whole at the same depth or deeper. A torn line costs only itself."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.fakes.segments import PARTITION
from tiers.access.open_tier import RemoteTierError
from tiers.model.ids import RemoteLogSegmentId
from tiers.upkeep.resume_notes import note_segment, noted_segments


def test_a_depth_counts_for_those_below_it(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    assert noted_segments(None) == noted_segments(path) == set()
    ids = [RemoteLogSegmentId(PARTITION, uuid4()) for _ in range(3)]
    with path.open("a") as notes:
        for depth, each in enumerate(ids):
            note_segment(notes, each, depth)
        note_segment(notes, ids[2], 0)
        notes.write('\n{"segment": "torn')
        note_segment(notes, ids[0], 1)
    names = [str(each.id) for each in ids]
    assert [noted_segments(path, depth) for depth in range(4)] == [set(names), set(names), {names[2]}, set()]
    whole = path.read_text()
    for kept in (0, 1, 5, 30):
        path.write_text(whole[:kept])
        assert noted_segments(path) == set()
    path.write_text("[1]\nrecords\n")
    with pytest.raises(RemoteTierError, match="was not written by this command"):
        noted_segments(path)
