"""The materialised state: compared with the model, restarted, and opened from damaged files."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.tiers.metadata_state import (
    NEIGHBOUR,
    NOW_MS,
    PARTITION,
    TOPIC_ID,
    Record,
    Topic,
    cut,
    gap,
    log_start,
    open_state,
    segment,
    to,
    user,
)
from tiers.errors import InvalidTransitionError
from tiers.metadata.records.serde import (
    LOCAL_LOG_START_API_KEY,
    TOPIC_MISSING_API_KEY,
    RecordKey,
    decode_key,
    key_of,
    log_gap_key,
    log_start_key,
    segment_keys,
)
from tiers.metadata.remote_log_metadata_manager import is_log_start_known, records_of_deletion, records_of_log_start
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.ids import TIER_PARTITION, RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH, LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import (
    LocalLogStartUpdate,
    RemoteLogSegmentMetadata,
    RemotePartitionDeleteMetadata,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState as State
from tiers.model.segment_state import RemotePartitionDeleteState as DeleteState


def test_a_segment_answers_only_while_it_is_finished(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    first = segment(1, 0, 99)
    assert topic.put(first) == []
    assert state.remote_log_segment_metadata(PARTITION, 50) is None
    assert [s.state for s in state.list_remote_log_segments(PARTITION)] == [State.COPY_SEGMENT_STARTED]

    assert topic.put(to(first, State.COPY_SEGMENT_FINISHED)) == [first.segment_id]
    found = state.remote_log_segment_metadata(PARTITION, 99)
    assert found is not None
    assert found.state is State.COPY_SEGMENT_FINISHED
    assert state.remote_log_segment_metadata(PARTITION, 100) is None
    assert (state.earliest_offset(PARTITION), state.remote_end_offset(PARTITION)) == (0, 99)

    topic.put(to(first, State.DELETE_SEGMENT_STARTED))
    assert state.remote_log_segment_metadata(PARTITION, 50) is None
    assert [s.state for s in state.list_remote_log_segments(PARTITION)] == [State.DELETE_SEGMENT_STARTED]

    topic.put(to(first, State.DELETE_SEGMENT_FINISHED))
    assert list(state.list_remote_log_segments(PARTITION)) == []
    assert state.remote_log_segment_metadata_by_id(first.segment_id) is None
    assert not state.is_tiered(TOPIC_ID)


def test_a_deleted_segment_is_kept_with_its_time_until_it_is_buried(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    first, second = segment(1, 0, 99), segment(2, 100, 199)
    deleted = replace(to(first, State.DELETE_SEGMENT_FINISHED), custom_metadata=b"where")
    topic.put(first, second, deleted)
    (kept,) = state.deleted_segments(PARTITION)
    assert (kept.segment_id, kept.end_offset, kept.event_timestamp_ms) == (first.segment_id, 99, NOW_MS + 2)
    assert (kept.state, kept.custom_metadata) == (State.DELETE_SEGMENT_FINISHED, b"where")
    assert state.deleted_segments() == state.deleted_segments(until_ms=NOW_MS + 2) == [kept]
    assert state.deleted_segments(until_ms=NOW_MS + 1) == []
    assert state.deleted_segments(replace(PARTITION, partition=PARTITION.partition + 1)) == []
    assert [one.segment_id for one in state.list_remote_log_segments(PARTITION)] == [second.segment_id]
    topic.put(RemotePartitionDeleteMetadata(PARTITION, 0, NOW_MS, DeleteState.DELETE_PARTITION_FINISHED))
    assert (state.deleted_segments(), state.is_known(PARTITION)) == ([kept], False)
    topic.bury(*segment_keys(first.segment_id))
    assert state.deleted_segments() == []


def test_the_time_of_an_event_is_the_topics(state: RemoteLogMetadataStateWriter) -> None:
    Topic(state).put(replace(segment(1, 0, 99), event_timestamp_ms=1))
    assert next(state.list_remote_log_segments(PARTITION)).event_timestamp_ms == NOW_MS


def test_replay_takes_forward_jumps_and_drops_the_rest(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    first, second = segment(1, 0, 99), segment(2, 100, 199)
    topic.put(to(second, State.COPY_SEGMENT_FINISHED))
    assert state.partitions() == []

    topic.put(first, to(first, State.DELETE_SEGMENT_STARTED), to(first, State.COPY_SEGMENT_FINISHED), first)
    assert [s.state for s in state.list_remote_log_segments(PARTITION)] == [State.DELETE_SEGMENT_STARTED]

    topic.put(to(first, State.DELETE_SEGMENT_FINISHED), to(first, State.DELETE_SEGMENT_STARTED))
    assert list(state.list_remote_log_segments(PARTITION)) == []
    topic.put(replace(second, state=State.COPY_SEGMENT_FINISHED))
    assert list(state.list_remote_log_segments(PARTITION)) == []


def test_an_announced_segment_may_be_described_until_it_is_finished(
    state: RemoteLogMetadataStateWriter,
) -> None:
    announced = replace(segment(1, 0, 99), segment_size_bytes=0)
    copied = replace(announced, start_offset=5, segment_size_bytes=4_000, custom_metadata=b"where")
    topic = Topic(state)
    topic.put(announced, copied, to(announced, State.COPY_SEGMENT_FINISHED), replace(copied, segment_size_bytes=7))
    assert [one.segment_size_bytes for one in state.list_remote_log_segments(PARTITION)] == [4_000]
    assert state.earliest_offset(PARTITION) == 5


def test_custom_metadata_outlives_an_update_that_has_none(state: RemoteLogMetadataStateWriter) -> None:
    first = segment(1, 0, 99)
    finished = replace(to(first, State.COPY_SEGMENT_FINISHED), custom_metadata=b"where")
    Topic(state).put(first, finished, to(first, State.DELETE_SEGMENT_STARTED))
    assert next(state.list_remote_log_segments(PARTITION)).custom_metadata == b"where"


def test_either_tombstone_removes_a_segment(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    for number, key in enumerate(segment_keys(segment(1, 0, 9).segment_id)):
        first = segment(1, 0, 9)
        topic.put(first, to(first, State.COPY_SEGMENT_FINISHED))
        assert state.earliest_offset(PARTITION) == 0, number
        topic.bury(key)
        assert state.earliest_offset(PARTITION) is None, number


def test_of_all_log_starts_the_highest_counts(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    assert state.log_start_offset(PARTITION) is None
    topic.put(log_start("a", user(50)), log_start("b", user(40)), log_start("b", user(50)))
    assert state.log_start_offset(PARTITION) == 50
    assert state.log_starts(PARTITION) == [user(50), user(40)]
    assert state.is_tiered(TOPIC_ID)
    assert state.log_start_offset(NEIGHBOUR) is None
    topic.bury(log_start_key(PARTITION, user(50)))
    assert state.log_starts(PARTITION) == [user(40)]
    topic.bury(log_start_key(PARTITION, user(40)))
    assert not state.is_tiered(TOPIC_ID)


def test_a_log_start_that_was_only_seen_deletes_nothing(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    seen = LogStart(70, 4, LogStartReason.SEEN)
    topic.put(log_start("a", seen))
    assert (state.log_starts(PARTITION), state.log_start_offset(PARTITION)) == ([], None)
    assert state.recorded_log_starts(PARTITION) == [seen]
    assert state.is_known(PARTITION)
    first = segment(1, 10, 99)
    topic.put(first, to(first, State.COPY_SEGMENT_FINISHED))
    assert state.log_start_offset(PARTITION) == 10
    retained = LogStart(30, 4, LogStartReason.RETENTION)
    topic.put(log_start("a", retained))
    assert state.log_starts(PARTITION) == [retained]
    assert state.log_start_offset(PARTITION) == 30


def test_a_log_start_of_another_history_does_not_stand(state: RemoteLogMetadataStateWriter) -> None:
    """The last readable record below it has a later leader epoch."""
    topic = Topic(state)
    topic.put(log_start("a", user(500, 2)), log_start("b", user(50, 3)))
    same_epoch, later_above = segment(1, 0, 99, epoch=2), segment(2, 500, 599, epoch=3)
    for each in (same_epoch, later_above):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))
    assert state.log_starts(PARTITION) == [user(500, 2), user(50, 3)]
    later_below = segment(3, 400, 499, epoch=4)
    topic.put(later_below)
    assert state.log_start_offset(PARTITION) == 500, "it is not copied yet"
    topic.put(to(later_below, State.COPY_SEGMENT_FINISHED))
    assert state.log_starts(PARTITION) == [user(50, 3)]
    assert state.log_start_offset(PARTITION) == 50
    assert not is_log_start_known(state, PARTITION, user(60, 4))


def test_a_log_start_stands_only_where_its_last_record_has_its_epoch(
    state: RemoteLogMetadataStateWriter,
) -> None:
    """A leader that was cut off had records of epoch 4 there, and an unclean election made it the leader again."""
    topic, start = Topic(state), LogStart(100, 5, LogStartReason.USER, last_epoch=5)
    below, deleted = segment(1, 0, 89, epoch=4), segment(2, 90, 149, epoch=5)
    for each in (below, deleted):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))
    topic.put(log_start("a", start), cut(6, 90))
    assert state.log_starts(PARTITION) == [start]
    other = replace(segment(3, 90, 120, epoch=4), copy_epoch=6)
    topic.put(other, to(other, State.COPY_SEGMENT_FINISHED))
    assert state.log_starts(PARTITION) == []
    assert state.log_start_offset(PARTITION) == 0
    topic.put(cut(7, 99))
    assert state.log_starts(PARTITION) == [start]


@pytest.mark.parametrize(
    ("end_offset", "epoch", "last_epoch", "stands"),
    [
        (89, 4, 4, True),
        (89, 3, 4, True),
        (89, 5, 4, False),
        (99, 4, 4, True),
        (99, 3, 4, False),
        (149, 3, 4, False),
        (89, 5, UNKNOWN_EPOCH, True),
        (149, 5, UNKNOWN_EPOCH, True),
        (89, 6, UNKNOWN_EPOCH, False),
    ],
)
def test_the_last_record_below_a_log_start_may_contradict_it(
    state: RemoteLogMetadataStateWriter, end_offset: int, epoch: int, last_epoch: int, stands: bool
) -> None:
    """The leader epochs of a log ascend, so the records further below show no more."""
    topic, start = Topic(state), user(100, 5, last_epoch)
    neighbours = replace(segment(3, 0, 99, epoch=9), segment_id=RemoteLogSegmentId(NEIGHBOUR, UUID(int=3)))
    for each in (segment(1, 0, 49, epoch=3), segment(2, 50, end_offset, epoch=epoch), neighbours):
        topic.put(each, to(each, State.COPY_SEGMENT_FINISHED))
    topic.put(log_start("a", start))
    assert state.log_starts(PARTITION) == ([start] if stands else [])


def test_the_last_epoch_of_a_recorded_log_start_is_added(state: RemoteLogMetadataStateWriter) -> None:
    topic, unnamed, named = Topic(state), user(100, 5), user(100, 5, last_epoch=4)
    topic.put(log_start("a", unnamed))
    assert is_log_start_known(state, PARTITION, unnamed)
    assert not is_log_start_known(state, PARTITION, named)
    topic.put(log_start("a", named))
    assert is_log_start_known(state, PARTITION, named)
    assert is_log_start_known(state, PARTITION, unnamed)
    assert is_log_start_known(state, PARTITION, user(99, 5, last_epoch=4))


def test_a_lower_log_start_of_a_later_epoch_replaces_no_earlier_one(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    topic.put(log_start("a", user(500, 2)), log_start("a", user(50, 5)))
    assert state.log_starts(PARTITION) == [user(500, 2), user(50, 5)]
    assert not is_log_start_known(state, PARTITION, user(60, 5)), "500 may be of another history"
    assert is_log_start_known(state, PARTITION, user(60, 2))
    assert is_log_start_known(state, PARTITION, user(50, 5))
    assert not is_log_start_known(state, PARTITION, user(50, 6))
    assert is_log_start_known(state, PARTITION, LogStart(9, 9, LogStartReason.SEEN))


def test_the_end_of_the_last_trim_counts_even_if_it_is_lower(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    assert state.local_log_start(PARTITION) is None
    for start in (OffsetAndEpoch(500, 2), OffsetAndEpoch(50, 5)):
        topic.put(LocalLogStartUpdate(PARTITION, "a", NOW_MS, start))
        assert state.local_log_start(PARTITION) == start
    assert state.is_known(PARTITION)
    topic.bury(RecordKey(LOCAL_LOG_START_API_KEY, PARTITION))
    assert (state.local_log_start(PARTITION), state.is_known(PARTITION)) == (None, False)


def test_a_gap_is_replaced_by_a_later_one_with_its_first_offset_and_ends(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    topic.put(gap(80, 110), gap(10, 20), gap(80, 120))
    assert state.gaps(PARTITION) == [LogGap(10, 20), LogGap(80, 120)]
    held = [state.gap_at(PARTITION, offset) for offset in (9, 10, 19, 20, 119, 120)]
    assert held == [None, LogGap(10, 20), LogGap(10, 20), None, LogGap(80, 120), None]
    assert state.gaps(NEIGHBOUR) == []
    assert (state.earliest_offset(PARTITION), state.log_start_offset(PARTITION)) == (None, None)
    topic.bury(log_gap_key(PARTITION, 10))
    assert state.gaps(PARTITION) == [LogGap(80, 120)]
    assert state.is_known(PARTITION)
    topic.bury(log_gap_key(PARTITION, 80))
    assert not state.is_known(PARTITION)


def test_the_marker_of_a_location_is_kept(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    announced = TierMarkerUpdate(TIER_PARTITION, "a", NOW_MS, "", UUID(int=3), False)
    confirmed = replace(announced, is_confirmed=True)
    topic.put(announced)
    assert state.tier_marker("") == announced
    topic.put(confirmed)
    assert (state.tier_marker(""), state.tier_marker("east"), state.partitions()) == (confirmed, None, [])


def test_a_topic_is_missing_since_the_brokers_time_until_it_is_there_again(
    state: RemoteLogMetadataStateWriter,
) -> None:
    topic, first = Topic(state), TopicIdPartition(TOPIC_ID, 0, "orders")
    topic.put(TopicMissingUpdate(first, "a", 5), TopicMissingUpdate(first, "b", 7))
    assert state.missing_topics() == {TOPIC_ID: NOW_MS}
    topic.bury(RecordKey(TOPIC_MISSING_API_KEY, first))
    assert state.missing_topics() == {}


def test_the_last_recorded_deletion_of_a_topic_has_the_brokers_time(state: RemoteLogMetadataStateWriter) -> None:
    topic, first = Topic(state), TopicIdPartition(TOPIC_ID, 0, "orders")
    last = TopicDeletionUpdate(first, "b", 7, False)
    topic.put(TopicDeletionUpdate(first, "a", 5, True), last)
    assert state.topic_deletions() == {TOPIC_ID: replace(last, event_timestamp_ms=NOW_MS + 1)}
    assert state.partitions() == []
    topic.bury(key_of(last))
    assert state.topic_deletions() == {}


def test_the_deletion_of_a_partition_takes_all_that_is_remembered_of_it(state: RemoteLogMetadataStateWriter) -> None:
    """And writes a tombstone for each record, so that compaction forgets it too."""
    topic = Topic(state)
    seen = LogStart(1, 1, LogStartReason.SEEN)
    records: list[Record] = [
        log_start("a", seen),
        log_start("a", user(5)),
        log_start("b", user(7)),
        LocalLogStartUpdate(PARTITION, "a", NOW_MS, OffsetAndEpoch(5, 1)),
        gap(10, 20),
        gap(30, 40),
    ]
    topic.put(*records)
    for started in list(DeleteState)[:-1]:
        topic.put(RemotePartitionDeleteMetadata(PARTITION, 1, NOW_MS, started))
    assert len(state.gaps(PARTITION)) == 2
    finished = RemotePartitionDeleteMetadata(PARTITION, 1, NOW_MS, DeleteState.DELETE_PARTITION_FINISHED)
    buried = [decode_key(key) for key, value in records_of_deletion(state, finished) if value is None]
    assert {*map(key_of, records)} <= {*buried}
    topic.put(finished)
    assert state.recorded_log_starts(PARTITION) == []
    assert (state.local_log_start(PARTITION), state.gaps(PARTITION)) == (None, [])
    topic.bury(*buried)
    assert state.partitions() == []


def test_a_deleted_partition_leaves_its_neighbours(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    mine, other = segment(1, 0, 99), segment(2, 0, 99, partition=NEIGHBOUR)
    topic.put(mine, other, to(mine, State.COPY_SEGMENT_FINISHED), to(other, State.COPY_SEGMENT_FINISHED))
    topic.put(log_start("a", user(5)))
    for deletion in DeleteState:
        topic.put(RemotePartitionDeleteMetadata(PARTITION, 1, NOW_MS, deletion))
        assert state.remote_partition_delete_state(PARTITION) is deletion
    assert state.partitions() == [NEIGHBOUR]
    assert state.log_start_offset(PARTITION) is None
    assert state.remote_end_offset(NEIGHBOUR) == 99
    topic.bury(RecordKey(2, PARTITION), RecordKey(1000, PARTITION, b"a"))
    assert state.remote_partition_delete_state(PARTITION) is DeleteState.DELETE_PARTITION_FINISHED
    assert state.partitions() == [NEIGHBOUR]


def test_next_segment_skips_a_hole(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    low, high = segment(1, 0, 99), segment(2, 200, 299)
    topic.put(low, high, to(low, State.COPY_SEGMENT_FINISHED), to(high, State.COPY_SEGMENT_FINISHED))
    starts = [None if s is None else s.start_offset for s in (state.next_segment(PARTITION, o) for o in (99, 100, 300))]
    assert starts == [0, 200, None]


def test_long_lists_are_read_in_pieces(state: RemoteLogMetadataStateWriter) -> None:
    Topic(state).put(*(segment(number + 1, number * 10, number * 10 + 9) for number in range(600)))
    assert [s.start_offset for s in state.list_remote_log_segments(PARTITION)] == list(range(0, 6000, 10))
    assert [s.start_offset for s in state.list_remote_log_segments(PARTITION, 3005)] == list(range(3000, 6000, 10))
    assert list(state.list_remote_log_segments(NEIGHBOUR)) == []


ranges = st.tuples(st.integers(0, 30), st.integers(0, 12))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ranges, st.tuples(st.integers(0, 2), st.integers(-1, 4))),
        st.tuples(st.just("move"), st.integers(0, 11), st.sampled_from(list(State)[1:])),
        st.tuples(
            st.just("start"),
            st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(UNKNOWN_EPOCH, 3)),
            st.sampled_from(list(LogStartReason)),
        ),
        st.tuples(st.just("cut"), st.integers(0, 40), st.integers(0, 4)),
    ),
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps)
def test_every_answer_is_the_naive_models(steps: list[tuple[str, object, object]]) -> None:
    asyncio.run(_compare_with_model(steps))


async def _compare_with_model(steps: list[tuple[str, object, object]]) -> None:
    model = InMemoryRemoteLogMetadataManager(wall_clock_ms=lambda: NOW_MS)
    with tempfile.TemporaryDirectory() as folder:
        state = open_state(Path(folder))
        topic = Topic(state)
        added: list[RemoteLogSegmentMetadata] = []
        for step in steps:
            match step:
                case ("add", (int(start), int(length)), (int(epoch), int(copy_epoch))):
                    one = segment(len(added) + 1, start, start + length, epoch)
                    added.append(replace(one, copy_epoch=copy_epoch))
                    await model.add_remote_log_segment_metadata(added[-1])
                    topic.put(added[-1])
                case ("move", int(index), State() as target) if index < len(added):
                    update = to(added[index], target)
                    try:
                        await model.update_remote_log_segment_metadata(update)
                    except InvalidTransitionError:
                        continue
                    topic.put(update)
                case ("cut", int(offset), int(epoch)):
                    await model.put_cut(PARTITION, epoch, offset)
                    topic.put(cut(epoch, offset))
                case ("start", (int(offset), int(epoch), int(last_epoch)), LogStartReason() as reason):
                    recorded = LogStart(offset, epoch, reason, last_epoch)
                    await model.put_log_start(PARTITION, recorded)
                    if not is_log_start_known(state, PARTITION, recorded):
                        raised = log_start("a", recorded)
                        records = records_of_log_start(state, raised)
                        topic.events(*((decode_key(key), None if value is None else raised) for key, value in records))
        try:
            for offset in range(45):
                expected = model.state.remote_log_segment_metadata(PARTITION, offset)
                assert state.remote_log_segment_metadata(PARTITION, offset) == expected
                assert state.next_segment(PARTITION, offset) == model.state.next_segment(PARTITION, offset)
                listed = list(model.state.list_remote_log_segments(PARTITION, offset))
                assert list(state.list_remote_log_segments(PARTITION, offset)) == listed
            assert state.earliest_offset(PARTITION) == model.state.earliest_offset(PARTITION)
            assert state.remote_end_offset(PARTITION) == model.state.remote_end_offset(PARTITION)
            assert state.log_start_offset(PARTITION) == model.state.log_start_offset(PARTITION)
            assert state.log_starts(PARTITION) == model.state.log_starts(PARTITION)
            all_starts = set(state.recorded_log_starts(PARTITION))
            assert all_starts == set(model.state.recorded_log_starts(PARTITION))
            assert state.is_known(PARTITION) == model.state.is_known(PARTITION)
            assert state.partitions() == model.state.partitions()
            assert state.is_tiered(TOPIC_ID) == model.state.is_tiered(TOPIC_ID)
        finally:
            state.close()
