"""A walk through segments in pieces equals single look-ups, for any state."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers.metadata_state import (
    NEIGHBOUR,
    PARTITION,
    Topic,
    cut,
    log_start,
    open_state,
    segment,
    to,
    user,
)
from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.state import segment_cursors
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState as State
from tiers.model.stored_segment import StoredSegment, stored_segment

LAST = 45

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.tuples(st.integers(0, 30), st.integers(0, 12), st.sampled_from([PARTITION, NEIGHBOUR])),
            st.integers(0, 2),
        ),
        st.tuples(st.just("move"), st.integers(0, 30), st.sampled_from(list(State)[1:])),
        st.tuples(st.just("start"), st.integers(0, 30), st.none()),
        st.tuples(st.just("cut"), st.integers(0, 40), st.integers(0, 4)),
    ),
    max_size=30,
)


def one_by_one(
    state: RemoteLogMetadataState, partition: TopicIdPartition, offset: int
) -> Iterator[RemoteLogSegmentMetadata]:
    while (found := state.next_segment(partition, offset)) is not None:
        yield found
        offset = found.valid_end_offset + 1


def offsets_from(offset: int, runs: Sequence[tuple[int, int]]) -> set[int]:
    return {each for first, following in runs for each in range(max(first, offset), following)}


def check_fields(one: StoredSegment) -> None:
    value = one.metadata
    for name in (
        *("start_offset", "end_offset", "valid_end_offset", "broker_id", "max_timestamp_ms"),
        *("event_timestamp_ms", "segment_size_bytes", "state", "txn_index_empty", "retained_bytes"),
    ):
        assert getattr(one, name) == getattr(value, name)
    assert one.id == value.segment_id.id.bytes
    assert one.is_finished == (value.state is State.COPY_SEGMENT_FINISHED)
    assert stored_segment(one.partition_key, one.answer) == one


def replay(topic: Topic, taken: list[tuple[str, object, object]]) -> list[RemoteLogSegmentMetadata]:
    added: list[RemoteLogSegmentMetadata] = []
    for step in taken:
        match step:
            case ("add", (int(start), int(length), TopicIdPartition() as where), int(epoch)):
                one = segment(len(added) + 1, start, start + length, epoch, where)
                epochs = (*one.segment_leader_epochs, LeaderEpochEntry(epoch + 1, start + length))
                added.append(replace(one, segment_leader_epochs=epochs[: 1 + epoch % 2]))
                topic.put(added[-1])
                if len(added) % 2:
                    topic.put(replace(to(added[-1], State.COPY_SEGMENT_FINISHED), custom_metadata=b"where"))
            case ("move", int(index), State() as target) if index < len(added):
                topic.put(to(added[index], target))
            case ("cut", int(offset), int(epoch)):
                topic.put(cut(epoch, offset))
            case ("start", int(offset), None):
                topic.put(log_start("a", user(offset)))
    return added


@settings(max_examples=60, deadline=None)
@given(taken=steps, piece=st.integers(1, 4))
def test_they_are_what_single_look_ups_find(taken: list[tuple[str, object, object]], piece: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_state(Path(folder))) as state,
        mock.patch.object(segment_cursors, "_PIECE", piece),
    ):
        added = replay(Topic(state), taken)
        for partition in (PARTITION, NEIGHBOUR):
            for one in [*state.stored_segments(partition), *state.answering_segments(partition)]:
                check_fields(one)
            for offset in range(-1, LAST, 2):
                found = [each.metadata for each in state.answering_segments(partition, offset)]
                assert found == list(one_by_one(state, partition, offset))
                runs = list(state.answered_offsets(partition, offset))
                assert all(first < following <= later for (first, following), (later, _) in pairwise(runs))
                assert offsets_from(offset, runs) == offsets_from(
                    offset, [(each.start_offset, each.valid_end_offset + 1) for each in found]
                )
            known = [state.remote_log_segment_metadata_by_id(each.segment_id) for each in added]
            mine = [each for each in known if each is not None and each.topic_id_partition == partition]
            mine.sort(key=lambda each: (each.start_offset, each.segment_id.id.bytes))
            for offset in range(0, LAST, 5):
                listed = [each.metadata for each in state.stored_segments(partition, offset)]
                assert listed == [each for each in mine if each.end_offset >= offset]


@settings(max_examples=100, deadline=None)
@given(taken=steps)
def test_a_segment_is_whole_in_one_run_or_it_is_listed_apart(taken: list[tuple[str, object, object]]) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(open_state(Path(folder))) as state:
        replay(Topic(state), taken)
        for partition in (PARTITION, NEIGHBOUR):
            runs = list(state.answered_offsets(partition))
            listed = list(state.list_remote_log_segments(partition))
            whole = [
                each
                for each in listed
                if (each.start_offset, each.end_offset + 1) in runs
                and state.remote_log_segment_metadata(partition, each.start_offset) == each
            ]
            apart = [each.metadata for each in state.segments_apart(partition)]
            assert apart == [each for each in listed if each not in whole]
            assert state.cover_size(partition) == (
                len(whole),
                sum(each.segment_size_bytes for each in whole),
                sum(following - first for first, following in runs),
            )


def test_a_change_during_a_listing_is_seen_from_the_next_piece_on(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    small = [segment(number + 1, number * 10, number * 10 + 9) for number in range(600)]
    for each in small:
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))
    found = state.answering_segments(PARTITION, 25)
    assert next(found).start_offset == 20
    merged = segment(1000, 2000, 5999)
    topic.put(merged, to(merged, State.COPY_SEGMENT_FINISHED))
    rest = [(each.start_offset, each.end_offset) for each in found]
    assert rest[0] == (30, 39)
    assert rest[-1] == (2000, 5999)
    assert all(later[0] <= earlier[1] + 1 for earlier, later in pairwise(rest))


def test_bytes_that_are_no_segment_are_refused() -> None:
    with pytest.raises(RemoteLogMetadataError, match="unreadable segment"):
        stored_segment(b"\0" * 20, b"short")


@pytest.mark.parametrize("walk", ["stored_segments", "answering_segments"])
def test_a_walk_over_a_state_that_is_closed_meanwhile_is_retried(walk: str, tmp_path: Path) -> None:
    """A process that shares the state opens it again when it is replaced."""
    with closing(open_state(tmp_path)) as state, mock.patch.object(segment_cursors, "_PIECE", 1):
        replay(Topic(state), [("add", (0, 9, PARTITION), 0), ("add", (10, 9, PARTITION), 0)])
        for one in state.stored_segments(PARTITION):
            Topic(state).put(to(one.metadata, State.COPY_SEGMENT_FINISHED))
        segments = getattr(state, walk)(PARTITION)
        assert next(segments).start_offset == 0
        state.close()
        with pytest.raises(RemoteLogMetadataNotReadyError):
            next(segments)
