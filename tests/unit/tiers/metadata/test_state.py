"""The materialised state: compared with the model, with compacted logs, and by examples of its rules."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.tiers.metadata_state import (
    IDENTITY,
    NEIGHBOUR,
    NOW_MS,
    PARTITION,
    TOPIC_ID,
    Topic,
    cut,
    gap,
    log_start,
    open_state,
    segment,
    to,
    user,
)
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import (
    MetadataRecord,
    RecordKey,
    decode_key,
    decode_value,
    key_of,
    segment_keys,
)
from tiers.metadata.remote_log_metadata_manager import records_of_deletion, records_of_log_start
from tiers.metadata.state import segment_cursors, writer
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TIER_PARTITION, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import (
    LeaderEpochEntry,
    LocalLogStartUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
)
from tiers.model.segment_metadata import RemoteLogSegmentState as State
from tiers.model.segment_metadata import RemotePartitionDeleteState as DeleteState
from tiers.model.stored_segment import StoredSegment, stored_segment

Transaction = list[tuple[RecordKey, MetadataRecord | None]]
OF_TOPIC = TopicIdPartition(TOPIC_ID, 0, "orders")
shapes = st.tuples(
    st.sampled_from([PARTITION, PARTITION, NEIGHBOUR]),
    *(st.integers(0, 30), st.integers(0, 12), st.integers(1, 5), st.integers(0, 2), st.integers(-1, 4)),
)
positions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=3)
"""Leader epoch and offset."""


def life(
    number: int, partition: TopicIdPartition, start: int, length: int, steps: int, epoch: int, copy_epoch: int
) -> list[Transaction]:
    """The transactions in which an owner writes a segment's states. The tombstones come in the last one."""
    metadata = replace(segment(number, start, start + length, epoch, partition), copy_epoch=copy_epoch)
    second = LeaderEpochEntry(epoch + 1, start + length)
    metadata = replace(metadata, segment_leader_epochs=(*metadata.segment_leader_epochs, second)[: 1 + epoch % 2])
    transactions: list[Transaction] = [[(key_of(metadata), metadata)]]
    for state in list(State)[1:steps]:
        update = to(metadata, state)
        transactions.append([(key_of(update), update)])
    if steps > len(State):
        transactions.append([(key, None) for key in segment_keys(metadata.segment_id)])
    return transactions


def life_of_plan(number: int, fates: list[str]) -> list[Transaction]:
    """The transactions of an offload: each tile is committed, deleted by its name, or was never begun. What had no
    answer was announced again."""
    bounds = tuple(range(0, 10 * len(fates) + 1, 10))
    plan = CopyPlan(PARTITION, "a", NOW_MS, UUID(int=500 + number), 1, 0, 0, bounds)
    transactions: list[Transaction] = [[(key_of(plan), plan)]] * (1 + len(fates) % 2)
    for fate, announced in zip(fates, plan.announced(), strict=True):
        if fate == "finished":
            measured, update = replace(announced, segment_size_bytes=100), to(announced, State.COPY_SEGMENT_FINISHED)
            transactions += [[(key_of(measured), measured)], [(key_of(update), update)]]
        deleting, update = to(announced, State.DELETE_SEGMENT_STARTED), to(announced, State.DELETE_SEGMENT_FINISHED)
        deletion: list[Transaction] = [
            [(key_of(deleting), deleting)],
            [(key_of(announced), announced), (key_of(update), update)],
        ]
        if fate in ("deleted", "deleted twice"):
            transactions += deletion
        if fate == "deleted twice":  # it was stored after the first time
            gone: Transaction = [(key, None) for key in segment_keys(announced.segment_id)]
            transactions += [[(key_of(announced), announced)], *deletion, gone]
    return [*transactions, [(key_of(plan), None)]]


@st.composite
def topics(draw: st.DrawFn) -> list[MetadataEvent]:
    lives = [life(number + 1, *shape) for number, shape in enumerate(draw(st.lists(shapes, max_size=6)))]
    records: list[MetadataRecord] = []
    for name in "ab":
        # In any order: a repeated request may append an older record after a newer one.
        last_epochs = st.integers(UNKNOWN_EPOCH, 3)
        records += [log_start(name, user(offset, epoch, draw(last_epochs))) for epoch, offset in draw(positions)]
    records += [log_start("a", LogStart(offset, epoch, LogStartReason.SEEN)) for epoch, offset in draw(positions)[:1]]
    records += [LocalLogStartUpdate(PARTITION, "a", NOW_MS, OffsetAndEpoch(end, at)) for at, end in draw(positions)]
    lives += [[[(key_of(record), record)] for record in records]]
    for first in (5, 50):
        ends = draw(st.lists(st.none() | st.integers(first + 1, 60), max_size=3))
        lives.append([[(key_of(gap(first, 60)), None if end is None else gap(first, end))] for end in ends])
    presences: tuple[MetadataRecord, ...] = (
        TierMarkerUpdate(TIER_PARTITION, "a", NOW_MS, "", UUID(int=3), True),
        UnfinishedRebuildUpdate(PARTITION, "a", NOW_MS),
        TopicMissingUpdate(OF_TOPIC, "a", NOW_MS),
        TopicDeletionUpdate(OF_TOPIC, "a", NOW_MS, False),
        TopicTierConfigUpdate(OF_TOPIC, "a", NOW_MS, {"local.retention.ms": "5"}),
        LocalLogStartUpdate(PARTITION, "a", NOW_MS, OffsetAndEpoch(7, 1)),
        log_start("a", user(8)),
        *(cut(epoch, offset) for epoch, offset in draw(positions)),
    )
    for one in presences:  # written and ended in turns
        turns = range(draw(st.integers(0, 3)))
        lives.append([[(key_of(one), None if turn % 2 else one)] for turn in turns])
    fates = st.lists(st.sampled_from(["finished", "deleted", "deleted twice", "never begun"]), min_size=1, max_size=3)
    lives += [life_of_plan(number, each) for number, each in enumerate(draw(st.lists(fates, max_size=2)))]
    order = draw(st.permutations([index for index, each in enumerate(lives) for _ in each]))
    pairs = [pair for index in order for pair in lives[index].pop(0)]
    return [MetadataEvent(offset, NOW_MS, *pair) for offset, pair in enumerate(pairs)]


def compacted(events: list[MetadataEvent], cleaned_to: int, *, keep_tombstones: bool) -> list[MetadataEvent]:
    """Returns the records that the cleaner leaves below `cleaned_to`: the last one of each key."""
    last = {event.key: event.offset for event in events[:cleaned_to]}
    return [
        event
        for event in events
        if event.offset >= cleaned_to
        or (event.offset == last[event.key] and (keep_tombstones or event.record is not None))
    ]


def answers(state: RemoteLogMetadataState) -> list[object]:
    return [
        list(state.list_remote_log_segments(PARTITION)),
        [list(state.list_remote_log_segments(PARTITION, offset)) for offset in (5, 20, 40)],
        sorted(state.deleted_segments(), key=lambda each: each.segment_id.id),
        [state.remote_log_segment_metadata(PARTITION, offset) for offset in range(45)],
        [state.next_segment(PARTITION, offset) for offset in range(0, 45, 4)],
        (state.earliest_offset(PARTITION), state.remote_end_offset(PARTITION), state.log_start_offset(PARTITION)),
        state.log_starts(PARTITION),
        sorted(state.recorded_log_starts(PARTITION), key=repr),
        state.local_log_start(PARTITION),
        state.gaps(PARTITION),
        state.cuts(PARTITION),
        state.tier_marker(""),
        state.tier_marker("east"),
        state.missing_topics(),
        state.topic_deletions(),
        (state.topic_tier_config(TOPIC_ID), state.topics_with_tier_config()),
        (state.partitions(), state.is_known(PARTITION), state.is_tiered(TOPIC_ID)),
        [plan.plan_id for plan in sorted(state.copy_plans(PARTITION), key=lambda each: each.plan_id)],
        state.cover_size(PARTITION).offsets,
    ]


def answers_of_model(events: list[MetadataEvent]) -> list[object]:
    """Replays the records into the model, except for updates of unknown segments and steps back."""
    model = InMemoryRemoteLogMetadataManager(lambda: NOW_MS, lambda: event.timestamp_ms)
    for event in events:
        model.written += 1
        record = event.record
        if isinstance(record, RemoteLogSegmentMetadata | RemoteLogSegmentMetadataUpdate):
            known = model.segments.get(record.segment_id)
            is_update = isinstance(record, RemoteLogSegmentMetadataUpdate)
            if known.state > record.state if known is not None else is_update:
                continue
        if record is None:
            model.log._end(event.key)  # type: ignore[attr-defined]  # the model's own
        else:
            model.log._put(record)  # type: ignore[attr-defined]
    return answers(model.state)


def replayed(*reads: tuple[list[MetadataEvent], int]) -> tuple[list[object], frozenset[int]]:
    with tempfile.TemporaryDirectory() as folder, closing(open_state(Path(folder))) as state:
        for events, end in reads:
            state.apply([PartitionRead(0, events, end)])
        assert state.next_offset(0) == reads[-1][1]
        return answers(state), state.unfinished_rebuilds()


@settings(max_examples=40, deadline=None)
@given(topics(), st.data())
def test_a_compacted_topic_has_the_answers_of_the_model(events: list[MetadataEvent], data: st.DataObject) -> None:
    end, read_to = len(events), data.draw(st.integers(0, len(events)), "read to")
    timed = [each._replace(timestamp_ms=NOW_MS + each.offset) for each in events]
    for known in (timed, timed[:read_to]):
        assert replayed((known, end))[0] == answers_of_model(known)
    whole = replayed((events, end))
    cleaned_to = data.draw(st.integers(0, end), "cleaned to")
    stopped_at = data.draw(st.integers(0, end), "stopped at")
    kept = compacted(events, cleaned_to, keep_tombstones=True)
    rest = [each for each in kept if each.offset >= stopped_at]
    assert replayed((compacted(events, cleaned_to, keep_tombstones=False), end)) == whole
    assert replayed((kept, end)) == whole
    assert replayed((events[:stopped_at], stopped_at), (rest, end)) == whole


def one_by_one(state: RemoteLogMetadataState, partition: TopicIdPartition, offset: int) -> list[object]:
    found: list[object] = []
    while (one := state.next_segment(partition, offset)) is not None:
        found.append(one)
        offset = one.valid_end_offset + 1
    return found


def offsets_from(offset: int, runs: Sequence[tuple[int, int]]) -> set[int]:
    return {each for first, following in runs for each in range(max(first, offset), following)}


def check_fields(one: StoredSegment) -> None:
    value = one.metadata
    for name in (
        *("start_offset", "end_offset", "valid_end_offset", "broker_id", "max_timestamp_ms", "leader_epoch"),
        *("event_timestamp_ms", "segment_size_bytes", "state", "txn_index_empty", "retained_bytes"),
    ):
        assert getattr(one, name) == getattr(value, name)
    assert one.id == value.segment_id.id.bytes
    assert one.is_finished == (value.state is State.COPY_SEGMENT_FINISHED)
    assert stored_segment(one.partition_key, one.answer) == one


@settings(max_examples=100, deadline=None)
@given(topics(), st.integers(1, 4))
def test_walks_and_sums_are_those_of_single_look_ups(events: list[MetadataEvent], piece: int) -> None:
    """A segment is whole if one run has all of its offsets, or it is listed apart."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_state(Path(folder))) as state,
        mock.patch.object(segment_cursors, "_PIECE", piece),
    ):
        for event in events:
            state.apply([PartitionRead(0, [event], event.offset + 1)])
        for partition in (PARTITION, NEIGHBOUR):
            for one in [*state.stored_segments(partition), *state.answering_segments(partition)]:
                check_fields(one)
            for offset in range(-1, 45, 4):
                found = [each.metadata for each in state.answering_segments(partition, offset)]
                assert found == one_by_one(state, partition, offset)
                runs = list(state.answered_offsets(partition, offset))
                assert all(first < following <= later for (first, following), (later, _) in pairwise(runs))
                readable = [(each.start_offset, each.valid_end_offset + 1) for each in found]
                assert offsets_from(offset, runs) == offsets_from(offset, readable)
            runs, listed = list(state.answered_offsets(partition)), list(state.list_remote_log_segments(partition))
            whole = [
                each
                for each in listed
                if (each.start_offset, each.end_offset + 1) in runs
                and state.remote_log_segment_metadata(partition, each.start_offset) == each
            ]
            assert [each.metadata for each in state.segments_apart(partition)] == [
                each for each in listed if each not in whole
            ]
            assert state.cover_size(partition) == (
                len(whole),
                sum(each.segment_size_bytes for each in whole),
                sum(following - first for first, following in runs),
            )


log_starts_in_any_order = st.lists(
    st.builds(LogStart, st.integers(0, 9), st.integers(0, 3), st.sampled_from(LogStartReason)), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(log_starts_in_any_order, st.data())
def test_compaction_loses_no_log_start(starts: list[LogStart], data: st.DataObject) -> None:
    """Every leader epoch keeps its highest log start of a user, after any compaction and any later record."""
    records: Transaction = []
    with tempfile.TemporaryDirectory() as folder, closing(open_state(Path(folder))) as state:
        topic = Topic(state)
        for start in starts:
            before = len(records)
            for key, value in records_of_log_start(state, log_start("a", start)):
                records.append((decode_key(key), None if value is None else decode_value(value)))
            topic.events(*records[before:])
            if data.draw(st.booleans(), "is repeated later"):
                again = records[data.draw(st.integers(0, len(records) - 1), "which")]
                if again[1] is not None:
                    records.append(again)
                    topic.events(again)
        recorded = state.log_starts(PARTITION)
    for start in starts:
        if start.reason is LogStartReason.USER:
            kept = [each for each in recorded if (each.leader_epoch, each.reason) == (start.leader_epoch, start.reason)]
            assert any(each.offset >= start.offset for each in kept)


def test_a_step_back_is_left_out(state: RemoteLogMetadataStateWriter) -> None:
    first = segment(1, 0, 99)
    states = State.DELETE_SEGMENT_STARTED, State.COPY_SEGMENT_FINISHED
    assert Topic(state).put(first, *(to(first, each) for each in states)) == []
    assert [each.state for each in state.list_remote_log_segments(PARTITION)] == [State.DELETE_SEGMENT_STARTED]


def test_a_deleted_segment_is_kept_with_the_brokers_time(state: RemoteLogMetadataStateWriter) -> None:
    topic, first = Topic(state), segment(1, 0, 99)
    topic.put(first, replace(to(first, State.DELETE_SEGMENT_FINISHED), custom_metadata=b"where"))
    (kept,) = state.deleted_segments(PARTITION)
    assert (kept.segment_id, kept.end_offset, kept.event_timestamp_ms) == (first.segment_id, 99, NOW_MS + 1)
    assert (kept.state, kept.custom_metadata) == (State.DELETE_SEGMENT_FINISHED, b"where")
    assert state.deleted_segments() == state.deleted_segments(until_ms=NOW_MS + 1) == [kept]
    assert state.deleted_segments(until_ms=NOW_MS) == state.deleted_segments(NEIGHBOUR) == []
    topic.put(RemotePartitionDeleteMetadata(PARTITION, 0, NOW_MS, DeleteState.DELETE_PARTITION_FINISHED))
    assert (state.deleted_segments(), state.is_known(PARTITION)) == ([kept], False)


def test_the_deletion_of_a_partition_removes_all_its_records(state: RemoteLogMetadataStateWriter) -> None:
    topic, plan = Topic(state), CopyPlan(PARTITION, "a", NOW_MS, UUID(int=77), 2, 4, 4, (100, 150))
    mine, other = segment(1, 0, 99), segment(2, 0, 99, partition=NEIGHBOUR)
    topic.put(mine, other, to(mine, State.COPY_SEGMENT_FINISHED), to(other, State.COPY_SEGMENT_FINISHED), plan)
    records: Sequence[MetadataRecord] = [
        log_start("a", LogStart(1, 1, LogStartReason.SEEN)),
        log_start("a", user(5)),
        log_start("b", user(7)),
        LocalLogStartUpdate(PARTITION, "a", NOW_MS, OffsetAndEpoch(5, 1)),
        gap(10, 20),
        gap(30, 40),
        cut(9, 70),
    ]
    topic.put(*records)
    for deletion in DeleteState:
        finished = RemotePartitionDeleteMetadata(PARTITION, 1, NOW_MS, deletion)
        written = [decode_key(key) for key, value in records_of_deletion(state, finished) if value is None]
        is_finished = deletion is DeleteState.DELETE_PARTITION_FINISHED
        assert ({*map(key_of, (*records, plan)), *segment_keys(mine.segment_id)} <= {*written}) is is_finished
        topic.put(finished)
        assert state.remote_partition_delete_state(PARTITION) is deletion
    assert (state.recorded_log_starts(PARTITION), state.local_log_start(PARTITION)) == ([], None)
    assert (state.gaps(PARTITION), state.cuts(PARTITION), state.copy_plans(PARTITION)) == ([], [], [])
    assert list(state.list_remote_log_segments(PARTITION)) == []
    topic.bury(*written)
    topic.put(RemotePartitionDeleteMetadata(PARTITION, 1, NOW_MS, DeleteState.DELETE_PARTITION_STARTED))
    assert state.remote_partition_delete_state(PARTITION) is DeleteState.DELETE_PARTITION_FINISHED
    assert state.partitions() == [NEIGHBOUR]
    assert state.remote_end_offset(NEIGHBOUR) == 99


def test_every_attempt_at_a_tile_has_its_own_name_in_the_plan() -> None:
    plan = CopyPlan(PARTITION, "a", NOW_MS, UUID(int=77), 2, 4, 4, (100, 150, 170))
    ids = plan.segment_ids()
    assert len({*ids}) == 4
    assert ids == replace(plan, writer="b").segment_ids() == [one.segment_id for one in plan.announced()]
    assert not {*ids} & {*replace(plan, plan_id=UUID(int=78)).segment_ids()}
    assert [(each.start_offset, each.end_offset) for each in plan.announced()] == [(100, 149)] * 2 + [(150, 169)] * 2


def test_a_segment_is_seen_before_it_can_be_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T_vis counts from then (docs/design.md, safety rule 1). A segment that was forgotten is never seen earlier."""
    monkeypatch.setattr(writer, "_SEEN_KEPT", 2)
    now_ms, readable = 1_000, []

    def clock_ms() -> int:
        readable.append(state.remote_end_offset(PARTITION) if now_ms > 1_000 else None)
        return now_ms

    opened = RemoteLogMetadataStateWriter.open
    with closing(opened(tmp_path, IDENTITY, clock_ms=clock_ms, map_size_bytes=1 << 22)) as state:
        topic, segments = Topic(state), [segment(number + 1, number * 10, number * 10 + 9) for number in range(3)]
        topic.put(*segments)
        assert state.seen_at_ms(segments[0].segment_id) is None
        for each in segments:
            now_ms += 100
            topic.put(to(each, State.COPY_SEGMENT_FINISHED))
        assert readable[-3:] == [None, 9, 19], "not yet at the time that counts"
        assert [state.seen_at_ms(each.segment_id) for each in segments] == [1_100, 1_200, 1_300]


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


@pytest.mark.parametrize("walk", ["stored_segments", "answering_segments"])
def test_a_walk_over_a_state_that_is_closed_meanwhile_is_retried(walk: str, tmp_path: Path) -> None:
    """A process that shares the state opens it again when it is replaced."""
    with closing(open_state(tmp_path)) as state, mock.patch.object(segment_cursors, "_PIECE", 1):
        for one in (segment(1, 0, 9), segment(2, 10, 19)):
            Topic(state).put(one, to(one, State.COPY_SEGMENT_FINISHED))
        segments = getattr(state, walk)(PARTITION)
        assert next(segments).start_offset == 0
        state.close()
        with pytest.raises(RemoteLogMetadataNotReadyError):
            next(segments)
