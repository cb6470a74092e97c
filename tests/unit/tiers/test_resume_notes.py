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


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("[1]\nrecords\n")
    with pytest.raises(RemoteTierError, match="was not written by this command"):
        noted_segments(path)


@pytest.mark.parametrize("kept", [0, 1, 5, 30])
def test_a_file_that_a_crash_cut_short_in_its_first_note_has_no_note(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "notes"
    with path.open("w") as notes:
        note_segment(notes, RemoteLogSegmentId(PARTITION, uuid4()))
    path.write_text(path.read_text()[:kept])
    assert noted_segments(path) == set()
