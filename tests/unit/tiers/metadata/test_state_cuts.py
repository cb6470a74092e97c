"""The materialised state of a partition whose end was cut off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiers.metadata_state import PARTITION, Topic, cut, open_state, segment, to
from tiers.metadata.records.serde import key_of
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.segment_state import RemoteLogSegmentState as State


@pytest.fixture
def state(tmp_path: Path) -> Iterator[RemoteLogMetadataStateWriter]:
    with closing(open_state(tmp_path)) as writer:
        yield writer


def test_a_cut_voids_what_was_copied_in_an_earlier_epoch(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    head, straddling, above = segment(1, 0, 99, epoch=1), segment(2, 100, 199, epoch=2), segment(3, 200, 299, epoch=3)
    for each in (head, straddling, above):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))
    topic.put(cut(4, 150))
    assert state.remote_end_offset(PARTITION) == 149
    assert state.remote_log_segment_metadata(PARTITION, 150) is None
    assert state.next_segment(PARTITION, 150) is None
    found = state.remote_log_segment_metadata(PARTITION, 149)
    assert found is not None
    assert (found.end_offset, found.valid_end_offset, found.is_cut_off) == (199, 149, False)
    listed = [(s.valid_end_offset, s.is_cut_off) for s in state.list_remote_log_segments(PARTITION)]
    assert listed == [(99, False), (149, False), (149, True)]

    after = segment(4, 150, 249, epoch=4)
    topic.put(after, to(after, State.COPY_SEGMENT_FINISHED))
    found = state.remote_log_segment_metadata(PARTITION, 150)
    assert found is not None
    assert (found.segment_id, found.valid_end_offset) == (after.segment_id, 249)
    assert state.remote_log_segment_metadata(PARTITION, 250) is None


def test_a_cut_voids_what_is_finished_after_it_in_an_earlier_epoch(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    begun = segment(1, 0, 99, epoch=1), segment(2, 100, 199, epoch=2), segment(3, 200, 299, epoch=3)
    topic.put(*begun, cut(4, 150))
    topic.put(*(to(each, State.COPY_SEGMENT_FINISHED) for each in begun))
    assert state.remote_end_offset(PARTITION) == 149


def test_a_cut_at_the_first_record_voids_all(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    head, tail = segment(1, 0, 99, epoch=1), segment(2, 100, 199, epoch=2)
    for each in (head, tail):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))
    topic.put(cut(3, 150), cut(4, 0))
    assert (state.earliest_offset(PARTITION), state.remote_end_offset(PARTITION)) == (None, None)
    assert [(one.leader_epoch, one.offset) for one in state.cuts(PARTITION)] == [(3, 150), (4, 0)]
    listed = [(one.cut_at, one.is_cut_off) for one in state.list_remote_log_segments(PARTITION)]
    assert listed == [(0, True), (0, True)]
    assert state.is_known(PARTITION)

    after = segment(3, 0, 49, epoch=4)
    topic.put(after, to(after, State.COPY_SEGMENT_FINISHED))
    assert (state.earliest_offset(PARTITION), state.remote_end_offset(PARTITION)) == (0, 49)
    topic.bury(key_of(cut(4, 0)))
    assert state.remote_end_offset(PARTITION) == 149


def test_the_lowest_cut_counts(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    long, head = segment(1, 0, 199), segment(2, 0, 49)
    for each in (long, head):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))

    def answers() -> list[tuple[int, int | None] | None]:
        found = [state.remote_log_segment_metadata(PARTITION, offset) for offset in (0, 60, 120, 199)]
        return [None if each is None else (each.segment_id.id.int, each.cut_at) for each in found]

    assert answers() == [(2, None), (1, None), (1, None), (1, None)]
    topic.put(cut(1, 100))
    assert answers() == [(2, None), (1, 100), None, None]
    topic.put(cut(2, 30))
    assert answers() == [(2, 30), None, None, None]
    topic.bury(key_of(cut(2, 30)))
    assert answers() == [(2, None), (1, 100), None, None]
    topic.bury(key_of(cut(1, 100)))
    assert answers() == [(2, None), (1, None), (1, None), (1, None)]


def test_a_missing_topic_is_forgotten_when_the_state_is_opened_again(tmp_path: Path) -> None:
    with closing(open_state(tmp_path)) as state:
        assert not state.is_final()
        state.mark_final(True)
        state.mark_fresh({0: 5})
        assert state.is_final()
        state.mark_final(False)
        assert not state.is_final()
        state.mark_final(True)
    with closing(open_state(tmp_path)) as state:
        assert not state.is_final()


def test_a_cut_leaves_a_copy_of_a_later_epoch_wherever_it_stands(state: RemoteLogMetadataStateWriter) -> None:
    """Compaction may leave the records in any order."""
    topic = Topic(state)
    old = replace(segment(1, 60, 99, epoch=3), copy_epoch=5)
    new = replace(segment(2, 70, 89, epoch=3), copy_epoch=7)
    for each in (new, old):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))
    topic.put(cut(6, 70))
    listed = {each.segment_id: each.valid_end_offset for each in state.list_remote_log_segments(PARTITION)}
    assert listed == {old.segment_id: 69, new.segment_id: 89}
    found = state.remote_log_segment_metadata(PARTITION, 70)
    assert found is not None
    assert found.segment_id == new.segment_id
    assert state.remote_end_offset(PARTITION) == 89


def test_of_several_cuts_in_one_leader_epoch_the_lowest_decides(state: RemoteLogMetadataStateWriter) -> None:
    topic, only = Topic(state), segment(1, 0, 99)
    topic.put(only, to(only, State.COPY_SEGMENT_FINISHED), cut(1, 70))
    for offset, lowest in ((50, 50), (80, 50), (40, 40)):
        topic.put(cut(1, offset))
        assert state.remote_end_offset(PARTITION) == lowest - 1
