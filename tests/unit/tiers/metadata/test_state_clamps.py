"""The materialised state of a partition whose end was cut off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.tiers.metadata_state import NOW_MS, PARTITION, Topic, clamp, open_state, segment, to
from tiers.metadata.records.serde import key_of, segment_keys
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.segment_metadata import CUT_ALL, QuarantineDeletionUpdate
from tiers.model.segment_state import RemoteLogSegmentState as State


@pytest.fixture
def state(tmp_path: Path) -> Iterator[RemoteLogMetadataStateWriter]:
    with closing(open_state(tmp_path)) as writer:
        yield writer


def test_a_clamp_cuts_what_was_finished_before_it(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    head, straddling, above = segment(1, 0, 99, epoch=1), segment(2, 100, 199, epoch=2), segment(3, 200, 299, epoch=3)
    for each in (head, straddling, above):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))
    topic.put(clamp(149))
    assert state.remote_end_offset(PARTITION) == 149
    assert [state.highest_offset_for_epoch(PARTITION, epoch) for epoch in (1, 2, 3)] == [99, 149, None]
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


def test_a_clamp_cuts_the_leader_epochs_of_what_is_finished_after_it(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    begun = segment(1, 0, 99, epoch=1), segment(2, 100, 199, epoch=2), segment(3, 200, 299, epoch=3)
    topic.put(*begun, clamp(149))
    topic.put(*(to(each, State.COPY_SEGMENT_FINISHED) for each in begun))
    assert state.remote_end_offset(PARTITION) == 149
    assert [state.highest_offset_for_epoch(PARTITION, epoch) for epoch in (1, 2, 3)] == [99, 149, None]


def test_a_clamp_before_the_first_record_cuts_all_of_it(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    head, tail = segment(1, 0, 99, epoch=1), segment(2, 100, 199, epoch=2)
    for each in (head, tail):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))
    topic.put(clamp(149), clamp(CUT_ALL))
    assert (state.earliest_offset(PARTITION), state.remote_end_offset(PARTITION)) == (None, None)
    assert [one.valid_end_offset for one in state.recorded_clamps(PARTITION)] == [149, CUT_ALL]
    assert [state.highest_offset_for_epoch(PARTITION, epoch) for epoch in (1, 2)] == [None, None]
    listed = [(one.clamped_to, one.is_cut_off) for one in state.list_remote_log_segments(PARTITION)]
    assert listed == [(CUT_ALL, True), (CUT_ALL, True)]
    assert state.is_known(PARTITION)

    after = segment(3, 0, 49, epoch=3)
    topic.put(after, to(after, State.COPY_SEGMENT_FINISHED))
    assert (state.earliest_offset(PARTITION), state.remote_end_offset(PARTITION)) == (0, 49)
    topic.bury(key_of(clamp(CUT_ALL)))
    assert state.remote_end_offset(PARTITION) == 149


def test_segments_below_a_clamp_tell_of_it_as_long_as_they_exist(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    long, head = segment(1, 0, 199), segment(2, 0, 49)
    for each in (long, head):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))

    def answers() -> list[tuple[int, int | None] | None]:
        found = [state.remote_log_segment_metadata(PARTITION, offset) for offset in (0, 60, 120, 199)]
        return [None if each is None else (each.segment_id.id.int, each.clamped_to) for each in found]

    assert answers() == [(2, None), (1, None), (1, None), (1, None)]
    topic.put(clamp(99))
    assert answers() == [(2, None), (1, 99), None, None]
    topic.put(clamp(29))
    assert answers() == [(2, 29), None, None, None]
    topic.bury(key_of(clamp(29)))
    assert answers() == [(2, None), (1, 99), None, None]
    topic.bury(key_of(clamp(99)))
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


def test_a_wish_to_delete_is_kept_while_the_segment_is(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    first = segment(1, 0, 9)
    wish = QuarantineDeletionUpdate(first.segment_id, "a", NOW_MS)
    topic.put(wish)
    assert not state.is_quarantine_deletion_asked(first.segment_id)
    topic.put(first, wish)
    assert state.is_quarantine_deletion_asked(first.segment_id)
    topic.bury(*segment_keys(first.segment_id), key_of(wish))
    assert not state.is_quarantine_deletion_asked(first.segment_id)
