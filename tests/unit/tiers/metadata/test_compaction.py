"""Compaction of the metadata topic changes nothing for a reader, wherever the reader starts or stopped."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers.metadata_state import (
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
from tiers.metadata.records.serde import MetadataRecord, RecordKey, decode_key, decode_value, key_of, segment_keys
from tiers.metadata.remote_log_metadata_manager import records_of_log_start
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TIER_PARTITION, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import (
    LocalLogStartUpdate,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    UnfinishedRebuildUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState as State

segments = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 5)), max_size=6)


def life(number: int, start: int, length: int, steps: int) -> list[list[tuple[RecordKey, object]]]:
    """The transactions in which an owner writes a segment's states. The tombstones come in the last one."""
    metadata = segment(number, start, start + length)
    transactions: list[list[tuple[RecordKey, object]]] = [[(key_of(metadata), metadata)]]
    for state in list(State)[1:steps]:
        update = to(metadata, state)
        transactions.append([(key_of(update), update)])
    if steps > len(State):
        transactions.append([(key, None) for key in segment_keys(metadata.segment_id)])
    return transactions


def life_of_plan(number: int, fates: list[str]) -> list[list[tuple[RecordKey, object]]]:
    """The transactions of an offload: each tile is committed, deleted by its name, or was never begun. What had no
    answer was announced again."""
    bounds = tuple(range(0, 10 * len(fates) + 1, 10))
    plan = CopyPlan(PARTITION, "a", NOW_MS, UUID(int=500 + number), 1, 0, 0, bounds)
    transactions: list[list[tuple[RecordKey, object]]] = [[(key_of(plan), plan)]] * (1 + len(fates) % 2)
    for fate, announced in zip(fates, plan.announced(), strict=True):
        if fate == "finished":
            measured, update = replace(announced, segment_size_bytes=100), to(announced, State.COPY_SEGMENT_FINISHED)
            transactions += [[(key_of(measured), measured)], [(key_of(update), update)]]
        deleting, update = to(announced, State.DELETE_SEGMENT_STARTED), to(announced, State.DELETE_SEGMENT_FINISHED)
        gone: list[tuple[RecordKey, object]] = [(key, None) for key in segment_keys(announced.segment_id)]
        deletion: list[list[tuple[RecordKey, object]]] = [
            [(key_of(deleting), deleting)],
            [(key_of(announced), announced), (key_of(update), update)],
        ]
        if fate in ("deleted", "deleted twice"):
            transactions += deletion
        if fate == "deleted twice":  # it was stored after the first time
            transactions += [[(key_of(announced), announced)], *deletion, gone]
    return [*transactions, [(key_of(plan), None)]]


def life_of_presence(record: MetadataRecord, turns: int) -> list[list[tuple[RecordKey, object]]]:
    """Written and ended in turns."""
    return [[(key_of(record), None if turn % 2 else record)] for turn in range(turns)]


positions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=3)
"""Leader epoch and offset."""


@st.composite
def topics(draw: st.DrawFn) -> list[MetadataEvent]:
    lives = [life(number + 1, *shape) for number, shape in enumerate(draw(segments))]
    for writer in "ab":
        # In any order: a repeated request may append an older record after a newer one.
        last_epochs = st.integers(UNKNOWN_EPOCH, 3)
        updates = [log_start(writer, user(offset, epoch, draw(last_epochs))) for epoch, offset in draw(positions)]
        lives.append([[(key_of(update), update)] for update in updates])
    seen = [log_start("a", LogStart(offset, epoch, LogStartReason.SEEN)) for epoch, offset in draw(positions)[:1]]
    lives.append([[(key_of(update), update)] for update in seen])
    trims = [LocalLogStartUpdate(PARTITION, "a", NOW_MS, OffsetAndEpoch(end, at)) for at, end in draw(positions)]
    lives.append([[(key_of(trim), trim)] for trim in trims])
    for first in (5, 50):
        ends = draw(st.lists(st.none() | st.integers(first + 1, 60), max_size=3))
        lives.append([[(key_of(gap(first, 60)), None if end is None else gap(first, end))] for end in ends])
    first_partition = TopicIdPartition(TOPIC_ID, 0, "orders")
    presences: tuple[MetadataRecord, ...] = (
        TierMarkerUpdate(TIER_PARTITION, "a", NOW_MS, "", UUID(int=3), True),
        UnfinishedRebuildUpdate(PARTITION, "a", NOW_MS),
        TopicMissingUpdate(first_partition, "a", NOW_MS),
        TopicDeletionUpdate(first_partition, "a", NOW_MS, False),
    )
    lives += [life_of_presence(presence, draw(st.integers(0, 3))) for presence in presences]
    cuts = [cut(epoch, offset) for epoch, offset in draw(positions)]
    lives.append([[(key_of(each), each)] for each in cuts])
    fates = st.lists(st.sampled_from(["finished", "deleted", "deleted twice", "never begun"]), min_size=1, max_size=3)
    lives += [life_of_plan(number, each) for number, each in enumerate(draw(st.lists(fates, max_size=2)))]
    turns = draw(st.permutations([index for index, each in enumerate(lives) for _ in each]))
    pairs = [pair for index in turns for pair in lives[index].pop(0)]
    events = []
    for offset, (key, record) in enumerate(pairs):
        assert record is None or isinstance(record, MetadataRecord)
        events.append(MetadataEvent(offset, NOW_MS, key, record))
    return events


def compacted(events: list[MetadataEvent], cleaned_to: int, *, keep_tombstones: bool) -> list[MetadataEvent]:
    """Returns the records that the cleaner leaves below `cleaned_to`: the last one of each key."""
    last = {event.key: event.offset for event in events[:cleaned_to]}
    return [
        event
        for event in events
        if event.offset >= cleaned_to
        or (event.offset == last[event.key] and (keep_tombstones or event.record is not None))
    ]


def answers(state: RemoteLogMetadataStateWriter) -> list[object]:
    return [
        list(state.list_remote_log_segments(PARTITION)),
        state.deleted_segments(),
        [state.remote_log_segment_metadata(PARTITION, offset) for offset in range(45)],
        state.log_starts(PARTITION),
        sorted(state.recorded_log_starts(PARTITION), key=repr),
        state.local_log_start(PARTITION),
        state.gaps(PARTITION),
        state.tier_marker(""),
        state.unfinished_rebuilds(),
        state.missing_topics(),
        state.topic_deletions(),
        state.partitions(),
        state.copy_plans(PARTITION),
        state.next_offset(0),
    ]


@settings(max_examples=40, deadline=None)
@given(topics(), st.data())
def test_a_compacted_topic_says_the_same(events: list[MetadataEvent], data: st.DataObject) -> None:
    cleaned_to = data.draw(st.integers(0, len(events)), "cleaned to")
    stopped_at = data.draw(st.integers(0, len(events)), "stopped at")
    said = []
    for before, after in (
        (events, []),
        ([], compacted(events, cleaned_to, keep_tombstones=False)),
        ([], compacted(events, cleaned_to, keep_tombstones=True)),
        (
            events[:stopped_at],
            [each for each in compacted(events, cleaned_to, keep_tombstones=True) if each.offset >= stopped_at],
        ),
    ):
        with tempfile.TemporaryDirectory() as folder, closing(open_state(Path(folder))) as state:
            state.apply([PartitionRead(0, before, stopped_at)])
            state.apply([PartitionRead(0, after, len(events))])
            said.append(answers(state))
    assert said[1:] == said[:1] * 3


def test_an_update_that_outlives_its_add_is_left_out() -> None:
    first = segment(1, 0, 9)
    update = to(first, State.DELETE_SEGMENT_STARTED)
    with tempfile.TemporaryDirectory() as folder, closing(open_state(Path(folder))) as state:
        state.apply([PartitionRead(0, [MetadataEvent(7, NOW_MS, key_of(update), update)], 8)])
        assert state.remote_log_segment_metadata_by_id(first.segment_id) is None
        assert not state.is_tiered(UUID(int=7))


log_starts_in_any_order = st.lists(
    st.builds(LogStart, st.integers(0, 9), st.integers(0, 3), st.sampled_from(LogStartReason)), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(log_starts_in_any_order, st.data())
def test_compaction_loses_no_log_start(starts: list[LogStart], data: st.DataObject) -> None:
    """Every leader epoch keeps its highest log start of a user, after any compaction and any later record."""
    records: list[tuple[RecordKey, MetadataRecord | None]] = []
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
        expected = state.log_starts(PARTITION), sorted(state.recorded_log_starts(PARTITION), key=repr)
    events = [MetadataEvent(offset, NOW_MS, key, record) for offset, (key, record) in enumerate(records)]
    cleaned_to = data.draw(st.integers(0, len(events)), "cleaned to")
    left = compacted(events, cleaned_to, keep_tombstones=data.draw(st.booleans(), "keep tombstones"))
    with tempfile.TemporaryDirectory() as folder, closing(open_state(Path(folder))) as state:
        state.apply([PartitionRead(0, left, len(events))])
        assert (state.log_starts(PARTITION), sorted(state.recorded_log_starts(PARTITION), key=repr)) == expected
        recorded = state.log_starts(PARTITION)
    for start in starts:
        if start.reason is LogStartReason.USER:
            kept = [each for each in recorded if (each.leader_epoch, each.reason) == (start.leader_epoch, start.reason)]
            assert any(each.offset >= start.offset for each in kept)


def test_a_late_record_of_a_lower_log_start_hides_no_higher_one() -> None:
    updates = [log_start("a", user(100, 1)), log_start("a", user(50, 2)), log_start("a", user(20, 1))]
    events = [MetadataEvent(offset, NOW_MS, key_of(update), update) for offset, update in enumerate(updates)]
    with tempfile.TemporaryDirectory() as folder, closing(open_state(Path(folder))) as state:
        state.apply([PartitionRead(0, compacted(events, 3, keep_tombstones=True), 3)])
        assert state.log_starts(PARTITION) == [user(100, 1), user(50, 2), user(20, 1)]
