"""A plan of `rebuild` from a store alone: its records, its refusals, and the replay of its records."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.tiers.segment_metadata import segment
from tiers.config.topic_policy import TierWork
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES
from tiers.metadata.metadata_log import MetadataPosition
from tiers.metadata.partition_facts import PartitionFacts
from tiers.metadata.records.serde import decode_key, decode_value
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import Cut, LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.upkeep.rebuild_plan import (
    FoundIndexes,
    FoundPartition,
    FoundSegment,
    PartitionPlan,
    plan_partition,
    records_of,
    tier_configs_of,
)

PARTITION = TopicIdPartition(UUID(int=7), 0, "orders")


class Store:
    """The result of a scan of a store. The offsets of a segment are its name."""

    def __init__(self) -> None:
        self.found = FoundPartition(TopicIdPartition(PARTITION.topic_id, 0))
        self.ids = 0

    def holds(
        self, start: int, end: int, *, log: bool = True, indexes: bool = True, content: bytes = b"", epoch: int = 0
    ) -> RemoteLogSegmentMetadata:
        self.ids += 1
        made = segment(PARTITION, start, end)
        made = replace(
            made,
            segment_id=replace(made.segment_id, id=UUID(int=self.ids)),
            segment_leader_epochs=(LeaderEpochEntry(epoch, start),),
            custom_metadata=b"as listed",
        )
        self.found.segments[made.segment_id.id] = FoundSegment(
            start,
            end,
            made.segment_size_bytes if log else None,
            FoundIndexes(made, content or bytes((self.ids,)), made.segment_size_bytes) if indexes else None,
        )
        return made

    def facts(
        self,
        log_start: int | LogStart | None = 0,
        trimmed_to: int | None = None,
        gaps: tuple[LogGap, ...] = (),
        dead: tuple[RemoteLogSegmentMetadata, ...] = (),
        cuts: tuple[Cut, ...] = (),
        position: int = 77,
    ) -> None:
        """Adds a `.facts` object."""
        start = user_log_start(log_start) if isinstance(log_start, int) else log_start
        at = MetadataPosition(UUID(int=9), 0, position)
        made = PartitionFacts(
            "c",
            PARTITION,
            () if start is None else (start,),
            None if trimmed_to is None else OffsetAndEpoch(trimmed_to, 0),
            gaps,
            cuts,
            tuple(each.segment_id.id for each in dead),
            tier_config={"local.retention.ms": "5"},
            position=at,
            settings_position=at,
        )
        self.found.facts.append(made)

    def loses(self, one: RemoteLogSegmentMetadata) -> None:
        del self.found.segments[one.segment_id.id]

    def plan(self) -> PartitionPlan:
        return plan_partition(self.found)


@pytest.fixture
def store() -> Store:
    return Store()


def live(plan: PartitionPlan) -> list[tuple[int, int]]:
    assert plan.refused == []
    return [(each.start_offset, each.end_offset) for each in plan.segments]


def test_segments_are_live_and_those_that_facts_call_dead_are_not(store: Store) -> None:
    first, second, dead = store.holds(0, 9), store.holds(10, 19), store.holds(10, 14)
    store.facts(log_start=3, dead=(dead,))
    plan = store.plan()
    assert live(plan) == [(0, 9), (10, 19)]
    assert (plan.unsure, plan.log_start_offset, plan.topic_id_partition.topic) == ([second], 3, "orders")
    assert first in plan.segments
    assert len(plan.dropped) == 1


def test_the_newest_facts_count_and_those_of_segments_too(store: Store) -> None:
    first, dead = store.holds(0, 9), store.holds(10, 19)
    store.facts(log_start=3, gaps=(LogGap(20, 30),), position=70)
    store.facts(log_start=2, dead=(dead,), trimmed_to=5, position=80)
    known = store.found.segments[first.segment_id.id]
    assert isinstance(known.indexes, FoundIndexes)
    earlier = store.found.facts.pop(0)
    assert isinstance(earlier, PartitionFacts)
    known.indexes = replace(known.indexes, facts=earlier)
    plan = store.plan()
    assert live(plan) == [(0, 9)]
    assert (plan.log_start_offset, plan.gaps, plan.local_log_start) == (2, [], (5, 0))
    assert [position.next_offset for _, position in plan.positions] == [80]


def test_the_last_segment_and_those_that_overlap_are_read_back(store: Store) -> None:
    store.holds(0, 9)
    later = store.holds(10, 19)
    store.holds(10, 19, content=bytes((later.segment_id.id.int,)))
    beside, last = store.holds(15, 29), store.holds(30, 39)
    plan = store.plan()
    assert live(plan) == [(0, 9), (10, 19), (15, 29), (30, 39)]
    assert plan.unsure == [later, beside, last]
    assert "other segments have its records" in plan.dropped[0]


def merged_of(
    store: Store, *parts: RemoteLogSegmentMetadata, size_bytes: int | None = None
) -> RemoteLogSegmentMetadata:
    made = store.holds(parts[0].start_offset, parts[-1].end_offset)
    found = store.found.segments[made.segment_id.id]
    assert isinstance(found.indexes, FoundIndexes)
    size_bytes = size_bytes or sum(each.segment_size_bytes for each in parts)
    whole = replace(made, segment_size_bytes=size_bytes, segment_leader_epochs=parts[0].segment_leader_epochs)
    found.indexes = replace(found.indexes, metadata=whole, stored_bytes=size_bytes)
    found.log_bytes = size_bytes
    return whole


def test_a_merged_segment_counts_when_a_part_is_lost(store: Store) -> None:
    """If a part had to be read back, damage to a copy that nobody needs would refuse the whole partition."""
    parts = store.holds(0, 9), store.holds(10, 19), store.holds(20, 29)
    whole = merged_of(store, *parts)
    store.loses(parts[0])
    plan = store.plan()
    assert (plan.segments, plan.unsure) == ([whole], [whole])
    assert all("other segments have its records" in each for each in plan.dropped[-2:])


def test_a_merge_that_did_not_come_to_count_is_not_missed(store: Store) -> None:
    parts = store.holds(0, 9), store.holds(10, 19), store.holds(20, 29)
    merged_of(store, *parts[:2])
    plan = store.plan()
    assert live(plan) == [(0, 9), (10, 19), (20, 29)]
    assert "it was merged from 2 segments, which all exist" in plan.dropped[0]
    assert {each.start_offset for each in plan.unsure} >= {each.start_offset for each in plan.segments}


def test_no_copy_that_was_not_read_back_takes_the_place_of_a_longer_one(store: Store) -> None:
    """An attempt that is not whole may remain beside the copy that replaced it, which goes on beyond its end."""
    attempt, instead = store.holds(0, 49), store.holds(0, 59)
    store.holds(50, 99)
    store.holds(100, 149)
    plan = store.plan()
    assert instead in plan.segments
    assert attempt in plan.unsure


def test_a_recorded_gap_is_recorded_again_where_no_segment_is(store: Store) -> None:
    """An attempt that ended later has filled a part of one."""
    store.holds(0, 9)
    store.holds(15, 19)
    store.facts(gaps=(LogGap(10, 17), LogGap(20, 30)))
    store.holds(30, 39)
    plan = store.plan()
    assert live(plan) == [(0, 9), (15, 19), (30, 39)]
    assert (plan.gaps, plan.notes) == ([LogGap(10, 15), LogGap(20, 30)], [])


def test_a_hole_is_left_to_the_owner_and_the_front_is_the_start(store: Store) -> None:
    store.holds(10, 19)
    store.holds(30, 39)
    store.facts(log_start=3)
    plan = store.plan()
    assert (live(plan), plan.gaps, plan.log_start_offset) == ([(10, 19), (30, 39)], [], 3)
    assert plan.notes == ["no segment has the offsets 20 to 29: their owner finds out what they were"]


def test_a_copy_below_the_log_start_or_without_an_end_is_left_out(store: Store) -> None:
    """A user deleted the records of a copy in progress, and then the copy ended."""
    store.holds(20, 29)
    store.holds(10, 15)
    store.holds(30, 34, indexes=False)
    plan = store.plan()
    assert (live(plan), plan.log_starts, plan.topic_id_partition.topic) == ([(10, 15), (20, 29)], [], "orders")
    assert "its copy did not end" in plan.dropped[0]
    store.facts(log_start=17)
    plan = store.plan()
    assert live(plan) == [(20, 29)]
    assert any("(10 to 15): it lies below the log start" in each for each in plan.dropped)


@pytest.mark.parametrize("later", [[(90, 120)], [(90, 94), (95, 120)]], ids=["one segment", "two segments"])
@pytest.mark.parametrize(
    ("log_start", "epochs"),
    [(LogStart(100, 5, LogStartReason.USER, last_epoch=5), (4, 4)), (user_log_start(100), (0, 8))],
    ids=["an uncommitted end", "an unclean election"],
)
def test_a_log_start_that_a_later_segment_disproves_is_left_out(
    store: Store, later: list[tuple[int, int]], log_start: LogStart, epochs: tuple[int, int]
) -> None:
    """The next copies have no record of the epoch that was deleted."""
    store.holds(0, 89, epoch=epochs[0])
    store.facts(log_start=log_start)
    copies = [store.holds(start, end, epoch=epochs[1]) for start, end in later]
    plan = store.plan()
    assert (live(plan), plan.refused, plan.dropped) == ([(0, 89), *later], [], [])
    assert (plan.log_starts, plan.unsure) == ([], copies[-1:])
    assert "log start 100 of leader epoch" in plan.notes[0]


def refused(store: Store) -> str:
    plan = store.plan()
    assert plan.refused
    return "\n".join(plan.refused)


def test_a_second_copy_is_not_needed_unless_it_differs(store: Store) -> None:
    """A late executor ended its copy after that of another one was committed."""
    first = store.holds(0, 9)
    store.holds(0, 9, content=bytes((first.segment_id.id.int,)))
    plan = store.plan()
    assert live(plan) == [(0, 9)]
    assert "other segments have its records" in plan.dropped[0]
    store.holds(0, 9)
    assert "it is not known which one counts" in refused(store)


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_copies_the_damaged_one_is_left_out(store: Store, is_first: bool) -> None:
    copies = [store.holds(0, 9)]
    copies.append(store.holds(0, 9, content=bytes((copies[0].segment_id.id.int,))))
    assert {each.segment_id.id for each in store.plan().unsure} == {store.plan().segments[0].segment_id.id}
    damaged, whole = copies if is_first else reversed(copies)
    plan = plan_partition(store.found, {damaged.segment_id.id: ["a checksum differs"]})
    assert [each.segment_id for each in plan.segments] == [whole.segment_id]
    assert "it is damaged, and other segments have its records" in plan.dropped[0]
    assert [each.segment_id for each in plan.unsure] == [whole.segment_id], "it is read back too"
    plan = plan_partition(store.found, {each.segment_id.id: ["a checksum differs"] for each in copies})
    assert plan.segments == []
    assert len(plan.refused) == 2


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_damaged_copy_with_other_records_is_refused(store: Store, epoch: int) -> None:
    damaged = store.holds(0, 9)
    store.holds(0, 9, epoch=epoch)
    assert plan_partition(store.found, {damaged.segment_id.id: ["a checksum differs"]}).refused


def test_two_contents_for_one_range_need_a_cut(store: Store) -> None:
    old, new = store.holds(0, 9), store.holds(0, 9, epoch=1)
    assert "it is not known which one counts" in refused(store)
    store.facts(cuts=(Cut(1, 0, 5),))
    assert [(each.segment_id, each.cut_at) for each in store.plan().segments] == [
        (old.segment_id, 0),
        (new.segment_id, None),
    ]


def test_a_cut_segment_stays_beside_a_copy_of_its_other_records(store: Store) -> None:
    """No other segment has the void records."""
    old, copy = store.holds(2, 22), store.holds(0, 17)
    store.facts(cuts=(Cut(1, 18, 5),))
    assert [(each.segment_id, each.cut_at) for each in store.plan().segments] == [
        (copy.segment_id, None),
        (old.segment_id, 18),
    ]


@pytest.mark.parametrize(("epoch", "is_same_log"), [(0, True), (1, False)])
def test_an_overlap_needs_the_same_epochs(store: Store, epoch: int, is_same_log: bool) -> None:
    """An owner in doubt goes on copying at the broker's log start."""
    store.holds(0, 9, epoch=0)
    store.holds(5, 14, epoch=epoch)
    if is_same_log:
        assert live(store.plan()) == [(0, 9), (5, 14)]
    else:
        assert "it has other records than segment" in refused(store)


def test_damaged_objects_are_refused(store: Store) -> None:
    last = store.holds(0, 9).segment_id.id
    store.found.segments[last].log_bytes = None
    assert "its .log object is missing" in refused(store)
    store.found.segments[last].log_bytes = 1
    assert "its .log object has 1 bytes" in refused(store)
    store.found.segments[last].indexes = "torn"
    assert "cannot be read: torn" in refused(store)
    store.found.segments[last].indexes = None
    assert live(store.plan()) == []


def test_facts_that_cannot_be_read_and_epochs_that_fall_are_refused(store: Store) -> None:
    known = store.found.segments[store.holds(0, 9, epoch=4).segment_id.id]
    store.holds(10, 19, epoch=3)
    assert "begins in leader epoch 3, after epoch 4" in refused(store)
    assert isinstance(known.indexes, FoundIndexes)
    known.indexes = replace(known.indexes, facts="a later release wrote them")
    store.found.facts.append("a wrong checksum")
    for why in ("a later release wrote them", "a wrong checksum"):
        assert f"facts in the store cannot be read: {why}" in refused(store)


def replayed(plan: PartitionPlan, folder: Path) -> RemoteLogMetadataStateWriter:
    events = []
    for offset, (key, value) in enumerate(records_of(plan, "writer", 1)):
        assert value is not None
        events.append(MetadataEvent(offset, 1, decode_key(key), decode_value(value)))
    state = RemoteLogMetadataStateWriter.open(folder, StateIdentity("c", UUID(int=1), 1), map_size_bytes=1 << 20)
    state.apply([PartitionRead(0, events, len(events))])
    return state


def test_replay_makes_of_the_records_what_was_planned(store: Store, tmp_path: Path) -> None:
    cut, deeper, last = store.holds(0, 19), store.holds(20, 39), store.holds(16, 29, epoch=1)
    store.facts(log_start=4, cuts=(Cut(1, 16, 5, is_proved=False),))
    plan = store.plan()
    assert len(live(plan)) == 3
    with closing(replayed(plan, tmp_path)) as state:
        assert state.log_start_offset(PARTITION) == 4
        assert [each.is_proved for each in state.cuts(PARTITION)] == [False]
        found = {each.segment_id.id: each for each in state.list_remote_log_segments(PARTITION)}
        assert {uuid: each.cut_at for uuid, each in found.items()} == {
            cut.segment_id.id: 16,
            deeper.segment_id.id: 16,
            last.segment_id.id: None,
        }
        assert all(each.custom_metadata == b"as listed" for each in found.values())
        for offset, wanted in ((0, cut), (15, cut), (16, last), (29, last)):
            holder = state.remote_log_segment_metadata(PARTITION, offset)
            assert holder is not None
            assert holder.segment_id == wanted.segment_id
        assert state.remote_log_segment_metadata(PARTITION, 30) is None
    [config] = tier_configs_of([plan, plan], "writer", 1)
    assert (config.topic_id_partition.partition, config.config) == (0, {"local.retention.ms": "5"})


ASKS_TO_DELETE = {"remote.storage.enable": "false", "remote.log.delete.on.disable": "true"}
ENABLED = {"remote.storage.enable": "true", "local.retention.ms": "5"}
MONTH, QUARTER = {RETENTION_MINUTES: "30", "local.retention.ms": "5"}, {RETENTION_MINUTES: "90"}
PAUSED = {TierWork.EXPIRING.key: "true"}


@pytest.mark.parametrize(
    ("configs", "rebuilt"),
    [
        ([MONTH], MONTH),
        ([MONTH, QUARTER], {RETENTION_MINUTES: "90", RETENTION_BYTES: "-1", "local.retention.ms": "5"}),
        ([{}, MONTH], {RETENTION_MINUTES: "-1", RETENTION_BYTES: "-1", "local.retention.ms": "5"}),
        ([ASKS_TO_DELETE], ASKS_TO_DELETE),
        ([ASKS_TO_DELETE, {}], None),  # the user may have taken the request back
        ([ASKS_TO_DELETE, ENABLED], ENABLED),
        ([PAUSED, {}], PAUSED),
        ([{}, PAUSED], PAUSED),  # a pause too many costs nothing, and an operator ends it
    ],
)
def test_settings_of_several_metadata_topics_delete_the_least(
    configs: list[Mapping[str, str]], rebuilt: Mapping[str, str] | None
) -> None:
    """Each partition has the settings of another metadata topic. The longest total retention counts."""
    plans = [PartitionPlan(replace(PARTITION, partition=number)) for number in range(len(configs))]
    for number, (plan, config) in enumerate(zip(plans, configs, strict=True)):
        at = MetadataPosition(UUID(int=number), 0, 5)
        plan.facts = [PartitionFacts("c", plan.topic_id_partition, tier_config=config, settings_position=at)]
    found = [each.config for each in tier_configs_of(plans, "writer", 1)]
    assert found == ([] if rebuilt is None else [rebuilt])


def test_the_newest_settings_of_a_metadata_topic_count() -> None:
    plans = [PartitionPlan(replace(PARTITION, partition=number)) for number in range(2)]
    for plan, minutes in zip(plans, ("90", "30"), strict=True):
        at = MetadataPosition(UUID(int=1), 0, 100 - int(minutes))
        config = {RETENTION_MINUTES: minutes}
        plan.facts = [PartitionFacts("c", plan.topic_id_partition, tier_config=config, settings_position=at)]
    assert [each.config for each in tier_configs_of(plans, "writer", 1)] == [{RETENTION_MINUTES: "30"}]
