"""The indexes of a merged segment are those of a copier that got all of it at once."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers.transactional_log import ACTS, copied, indexes_of, log_of
from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.merged_indexes import why_not_continued, with_merged_indexes
from tiers.segment.segment_builder import BuiltSegment, SegmentBuilder


def merged(folder: Path, parts: list[BuiltSegment]) -> BuiltSegment:
    stored = [indexes_of(each) for each in parts]
    for earlier, later in pairwise(stored):
        assert why_not_continued(earlier, later) is None
    path = folder / f"merged-{len(list(folder.iterdir()))}"
    builder = SegmentBuilder(path, parts[0].start_offset, stored[0].epochs_before(), chunk_bytes=200)
    named = stored[-1].indexes.leader_epochs
    for part in parts:
        builder.append(part.log_segment.read_bytes(), (), named)
    return with_merged_indexes(builder.finish(), stored)


@settings(max_examples=25)
@given(ACTS, st.data())
def test_a_merged_segment_equals_one_that_was_copied_at_once(acts: list[tuple[int, str]], data: st.DataObject) -> None:
    log = log_of(acts)
    count = len(log.batches)
    ends = sorted({*data.draw(st.sets(st.integers(1, max(count, 1)))), count})
    base = data.draw(st.sampled_from((0, min(2, count))))
    with tempfile.TemporaryDirectory() as name:
        parts = copied(Path(name), log, ends, base)
        if not parts:
            return
        first = data.draw(st.integers(0, len(parts) - 1))
        last = data.draw(st.integers(first, len(parts) - 1))
        starts = [batch.base_offset for batch in log.batches]
        cuts = [starts.index(each.start_offset) for each in parts[1:]] + [count]
        whole = copied(Path(name), log, [*cuts[:first], *cuts[last:]], base)[first]
        found = merged(Path(name), parts[first : last + 1])
        assert found.log_segment.read_bytes() == whole.log_segment.read_bytes()
        assert found.indexes == whole.indexes
        assert (found.txn_index_empty, found.leader_epochs, found.segment_leader_epochs, found.max_timestamp_ms) == (
            whole.txn_index_empty,
            whole.leader_epochs,
            whole.segment_leader_epochs,
            whole.max_timestamp_ms,
        )


ACTS_OF_TWO = [(1, "data"), (1, "plain"), (1, "elected"), (1, "plain"), (1, "abort"), (1, "plain")]


def test_a_segment_with_less_knowledge_is_not_merged_with_its_predecessor(tmp_path: Path) -> None:
    earlier, later = map(indexes_of, copied(tmp_path, log_of(ACTS_OF_TWO), [2, 5]))
    forgot = replace(later, indexes=replace(later.indexes, history_from=4))
    epochs = replace(later, indexes=replace(later.indexes, leader_epochs=(LeaderEpochEntry(1, 4),)))
    for first, second, why in (
        (earlier, later, None),
        (later, earlier, "offsets from 9 on are missing or occur twice"),
        (earlier, forgot, "the segment at 4 does not know the transactions before it"),
        (earlier, epochs, "the segment at 4 does not know the leader epochs before it"),
    ):
        assert why_not_continued(first, second) == why


def test_a_log_that_is_not_the_parts_is_refused(tmp_path: Path) -> None:
    parts = copied(tmp_path, log_of(ACTS_OF_TWO), [2, 5])
    with pytest.raises(CorruptSegmentError, match="the segments have offsets 0 to 8"):
        with_merged_indexes(parts[0], [indexes_of(each) for each in parts])
    strange = replace(parts[0], indexes=replace(parts[0].indexes, leader_epochs=(LeaderEpochEntry(7, 0),)))
    with pytest.raises(CorruptSegmentError, match="leader epochs"):
        with_merged_indexes(strange, [indexes_of(parts[0])])
