"""Lost indexes are rebuilt from the log: the same bytes with both neighbours, and no guesses without them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fakes.segments import metadata_of
from tests.support.tiers.transactional_log import ACTS, COMPACTED_EPOCHS, compacted_log, copied, indexes_of, log_of
from tests.support.written_log import WrittenLog
from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes_of_log import LogIndexer
from tiers.segment.leader_epochs import UnknownEpochStartError
from tiers.segment.segment_builder import BuiltSegment


def made_again(
    folder: Path, lost: BuiltSegment, before: BuiltSegment | None, after: BuiltSegment | None
) -> BuiltSegment:
    earlier, later = (None if each is None else indexes_of(each) for each in (before, after))
    indexer = LogIndexer(folder / "again", metadata_of(lost), earlier, later)
    try:
        indexer.append(lost.log_segment.read_bytes())
        return indexer.finish()
    finally:
        indexer.discard()


@settings(max_examples=25)
@given(ACTS, st.data())
def test_lost_indexes_are_rebuilt_between_the_neighbouring_segments(
    acts: list[tuple[int, str]], data: st.DataObject
) -> None:
    log = log_of(acts)
    count = len(log.batches)
    ends = sorted({*data.draw(st.sets(st.integers(1, max(count, 1)))), count})
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "copied").mkdir()
        segments = copied(Path(name) / "copied", log, ends, chunk_bytes=1 << 20)
        for number, lost in enumerate(segments[:-1]):
            found = made_again(Path(name), lost, segments[number - 1] if number else None, segments[number + 1])
            assert found.indexes == lost.indexes


def test_an_aborted_transaction_without_its_first_records_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader and the neighbouring segments name it by its first record, which the cleaner has removed."""
    log = log_of([(1, "plain"), (2, "data"), (1, "plain"), (2, "data"), (1, "plain"), (2, "abort")])
    whole = WrittenLog()
    whole.batches = list(log.batches)
    monkeypatch.setattr(log, "reports", whole.reports)
    del log.batches[1]
    (tmp_path / "copied").mkdir()
    before, lost, after = copied(tmp_path / "copied", log, [2, 3, 5])
    assert [one.first_offset for one in lost.indexes.aborted_transactions] == [2]
    assert made_again(tmp_path, lost, before, after).indexes == lost.indexes


@pytest.mark.parametrize("ends", [[1, 3, 6], [2, 4, 6], [1, 2, 3, 4, 5, 6], [6]])
@pytest.mark.parametrize("named", [COMPACTED_EPOCHS, None], ids=["the leader named", "no leader named"])
def test_epochs_that_begin_in_a_hole_begin_there_again(
    tmp_path: Path, ends: list[int], named: tuple[LeaderEpochEntry, ...] | None
) -> None:
    (tmp_path / "copied").mkdir()
    segments = copied(tmp_path / "copied", compacted_log(), ends, chunk_bytes=1 << 20, named=named)
    for before, lost in pairwise([None, *segments]):
        assert lost is not None
        assert made_again(tmp_path, lost, before, None).indexes == lost.indexes


def test_a_log_in_another_epoch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "copied").mkdir()
    before, lost = copied(tmp_path / "copied", compacted_log(), [1, 6], named=COMPACTED_EPOCHS)
    other = replace(lost, indexes=replace(lost.indexes, leader_epochs=lost.leader_epochs[:-1]))
    with pytest.raises(UnknownEpochStartError):
        made_again(tmp_path, other, before, None)


OPEN_AT_THE_END = log_of([(1, "data"), (1, "plain"), (1, "plain"), (1, "abort")])


@pytest.fixture
def two(tmp_path: Path) -> list[BuiltSegment]:
    (tmp_path / "copied").mkdir()
    return copied(tmp_path / "copied", OPEN_AT_THE_END, [2, 4])


def test_no_more_is_claimed_than_log_and_neighbours_tell(tmp_path: Path, two: list[BuiltSegment]) -> None:
    first, second = two
    with pytest.raises(CorruptSegmentError, match="is open at its end"):
        made_again(tmp_path, first, None, None)
    assert made_again(tmp_path, second, first, None).indexes.aborted_transactions[0].last_offset == 6
    found = made_again(tmp_path, second, None, None).indexes
    assert (found.history_from, found.offset_index) == (4, second.indexes.offset_index)
    assert found.aborted_transactions == ()


def test_the_log_of_another_segment_is_refused(tmp_path: Path, two: list[BuiltSegment]) -> None:
    first, second = two
    indexer = LogIndexer(tmp_path / "again", metadata_of(first), None, indexes_of(second))
    indexer.append(OPEN_AT_THE_END.batches[0].data)
    with pytest.raises(CorruptSegmentError, match="the log is not the segment's"):
        indexer.finish()
    indexer.discard()
