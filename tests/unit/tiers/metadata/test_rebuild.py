"""A plan of `rebuild` from a store alone: its records, its refusals, and the replay of its records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.tiers.segment_metadata import segment
from tiers.config.paused_work import TierWork
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES
from tiers.metadata.partition_manifest import ManifestSegment, PartitionManifest
from tiers.metadata.records.serde import decode_key, decode_value
from tiers.metadata.remote_log_metadata_manager import MetadataPosition
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

    def manifest(
        self,
        *accepted: RemoteLogSegmentMetadata,
        log_start: int | LogStart | None = 0,
        trimmed_to: int | None = None,
        gaps: tuple[LogGap, ...] = (),
        dead: tuple[RemoteLogSegmentMetadata, ...] = (),
        cuts: tuple[Cut, ...] = (),
    ) -> None:
        self.found.manifest = PartitionManifest(
            "c",
            PARTITION,
            user_log_start(log_start) if isinstance(log_start, int) else log_start,
            None if trimmed_to is None else OffsetAndEpoch(trimmed_to, 0),
            MetadataPosition(UUID(int=9), 0, 77),
            gaps,
            cuts,
            tuple(
                ManifestSegment(
                    each.segment_id.id,
                    each.start_offset,
                    each.end_offset,
                    each.segment_size_bytes,
                    each.segment_leader_epochs,
                    each.leader_epoch,
                    b"as recorded",
                )
                for each in accepted
            ),
            tuple(each.segment_id.id for each in dead),
            {"local.retention.ms": "5"},
        )

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


def test_accepted_segments_are_live_and_segments_called_dead_are_not(store: Store) -> None:
    first, second, dead = store.holds(0, 9), store.holds(10, 19), store.holds(10, 14)
    store.manifest(first, second, log_start=3, dead=(dead,))
    plan = store.plan()
    assert live(plan) == [(0, 9), (10, 19)]
    assert (plan.unnamed, plan.log_start_offset, plan.topic_id_partition.topic) == ([], 3, "orders")
    assert {each.custom_metadata for each in plan.segments} == {b"as recorded"}
    assert len(plan.dropped) == 1


def test_segments_after_the_manifest_continue_it(store: Store) -> None:
    store.manifest(store.holds(0, 9))
    later = store.holds(10, 19)
    store.holds(10, 19, content=bytes((later.segment_id.id.int,)))
    plan = store.plan()
    assert live(plan) == [(0, 9), (10, 19)]
    assert [each.custom_metadata for each in plan.unnamed] == [b"as listed"]
    assert "another segment has the same content" in plan.dropped[0]


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


@pytest.mark.parametrize("are_named", [True, False])
def test_a_merge_that_did_not_come_to_count_is_not_missed(store: Store, are_named: bool) -> None:
    parts = store.holds(0, 9), store.holds(10, 19), store.holds(20, 29)
    if are_named:
        store.manifest(*parts)
    merged_of(store, *parts[:2])
    plan = store.plan()
    assert live(plan) == [(0, 9), (10, 19), (20, 29)]
    assert "it was merged from 2 segments, which all exist" in plan.dropped[0]


def test_a_false_merge_and_a_merge_with_a_lost_part_are_refused(store: Store) -> None:
    parts = store.holds(0, 9), store.holds(10, 19)
    store.manifest(*parts)
    whole = merged_of(store, *parts, size_bytes=1)
    assert "it is not known which one counts" in store.plan().refused[0]
    store.loses(whole)
    merged_of(store, *parts)
    store.loses(parts[1])
    assert len(store.plan().refused) == 1


def test_a_merged_segment_and_its_parts_may_both_be_accepted(store: Store) -> None:
    first, second = store.holds(0, 9, epoch=1), store.holds(10, 19, epoch=2)
    whole = merged_of(store, first, second)
    found = store.found.segments[whole.segment_id.id].indexes
    assert isinstance(found, FoundIndexes)
    epochs = (*first.segment_leader_epochs, *second.segment_leader_epochs)
    whole = replace(whole, segment_leader_epochs=epochs)
    store.found.segments[whole.segment_id.id].indexes = replace(found, metadata=whole)
    later = store.holds(20, 29, epoch=3)
    store.manifest(first, whole, second, later)
    assert sorted(live(store.plan())) == [(0, 9), (0, 19), (10, 19), (20, 29)]
    store.manifest(first, whole, second, later, dead=())
    diverged = store.holds(30, 39, epoch=1)
    store.manifest(first, whole, second, later, diverged)
    assert "the log diverged there" in store.plan().refused[0]


def test_without_a_manifest_all_that_tiles_is_live(store: Store) -> None:
    store.holds(20, 29)
    store.holds(10, 19)
    store.holds(30, 34, indexes=False)
    plan = store.plan()
    assert live(plan) == [(10, 19), (20, 29)]
    assert (plan.log_start, plan.topic_id_partition.topic) == (None, "orders")
    assert "its copy did not end" in plan.dropped[0]


@pytest.mark.parametrize("trimmed_to", [None, 2, 10, 15])
def test_segments_missing_at_the_front_are_a_gap_and_no_log_start(store: Store, trimmed_to: int | None) -> None:
    gone, kept = store.holds(0, 9), store.holds(10, 19)
    store.manifest(gone, kept, log_start=3, trimmed_to=trimmed_to)
    store.loses(gone)
    plan = store.plan()
    assert (live(plan), plan.log_start_offset, plan.gaps) == ([(10, 19)], 3, [LogGap(3, 10)])
    assert "1 segments below 10 are gone" in plan.notes[0]
    assert "the offsets 3 to 9 are a gap" in plan.notes[0]


def test_unnamed_records_behind_missing_segments_are_no_gap(store: Store) -> None:
    """The brokers, or the spool of a process, still have them."""
    gone, kept = store.holds(0, 9), store.holds(30, 39)
    store.manifest(gone, kept)
    store.loses(gone)
    plan = store.plan()
    assert (live(plan), plan.gaps) == ([(30, 39)], [LogGap(0, 10)])


def test_segments_missing_below_the_log_start_are_no_gap(store: Store) -> None:
    gone, kept = store.holds(0, 9), store.holds(10, 19)
    store.manifest(gone, kept, log_start=12)
    store.loses(gone)
    plan = store.plan()
    assert (live(plan), plan.log_start_offset, plan.gaps) == ([(10, 19)], 12, [])
    assert "lie below the log start" in plan.notes[0]
    assert "gap" not in plan.notes[0]


def test_a_recorded_gap_is_recorded_again(store: Store) -> None:
    before, behind = store.holds(0, 9), store.holds(15, 19)
    store.manifest(before, behind, gaps=(LogGap(10, 15), LogGap(20, 30)))
    unnamed = store.holds(30, 39)
    plan = store.plan()
    assert live(plan) == [(0, 9), (15, 19), (30, 39)]
    assert (plan.unnamed, plan.gaps) == ([unnamed], [LogGap(10, 15), LogGap(20, 30)])


def test_where_nothing_is_left_the_log_start_stays_for_the_owner_to_move(store: Store) -> None:
    gone = store.holds(0, 9), store.holds(10, 19)
    store.manifest(*gone, log_start=3, trimmed_to=15)
    for each in gone:
        store.loses(each)
    plan = store.plan()
    assert (live(plan), plan.log_start_offset) == ([], 3)
    assert "all 2 segments that the manifest names are gone" in plan.notes[0]


def test_segments_after_the_manifest_continue_deleted_ones(store: Store) -> None:
    gone = store.holds(0, 9)
    store.manifest(gone)
    later = store.holds(10, 19)
    store.loses(gone)
    plan = store.plan()
    assert (live(plan), plan.unnamed, plan.log_start_offset) == ([(10, 19)], [later], 0)
    store.loses(later)
    store.holds(11, 19)
    assert "offsets from 10 on are missing" in refused(store)


def test_a_leftover_below_the_log_start_is_not_read_again(store: Store) -> None:
    store.holds(0, 9)
    store.manifest(store.holds(10, 19), log_start=10)
    assert live(store.plan()) == [(10, 19)]


def test_a_copy_that_ended_after_its_records_were_deleted_is_left_out(store: Store) -> None:
    """A user deleted the records of a copy in progress, the manifest was written, and then the copy ended."""
    before = store.holds(0, 9)
    store.manifest(before, log_start=17)
    store.holds(10, 15)
    plan = store.plan()
    assert live(plan) == [(0, 9)]
    assert "(10 to 15): it lies below the log start" in plan.dropped[0]


def test_a_log_start_that_a_later_segment_denies_is_left_out(store: Store) -> None:
    """An unclean election cut the log below that log start, and the manifest is older than the next copy."""
    first = store.holds(0, 89)
    later = [store.holds(90, 94, epoch=8), store.holds(95, 120, epoch=8)]
    store.manifest(first, log_start=100)
    plan = plan_partition(store.found)
    assert (live(plan), plan.refused, plan.dropped) == ([(0, 89), (90, 94), (95, 120)], [], [])
    assert plan.unnamed == later
    assert plan.log_start is None
    assert "log start 100 of leader epoch" in plan.notes[0]


@pytest.mark.parametrize("later", [[(90, 120)], [(90, 94), (95, 120)]], ids=["one segment", "two segments"])
def test_a_log_start_that_an_uncommitted_end_denies_is_left_out(store: Store, later: list[tuple[int, int]]) -> None:
    """The next copies have records of an old epoch below the log start, and none of the epoch that was deleted."""
    first = store.holds(0, 89, epoch=4)
    store.manifest(first, log_start=LogStart(100, 5, LogStartReason.USER, last_epoch=5))
    for start, end in later:
        store.holds(start, end, epoch=4)
    plan = plan_partition(store.found)
    assert (live(plan), plan.refused, plan.dropped) == ([(0, 89), *later], [], [])
    assert plan.log_start is None


def refused(store: Store) -> str:
    plan = store.plan()
    assert plan.refused
    return "\n".join(plan.refused)


def test_a_second_copy_of_what_is_accepted_is_not_needed_unless_it_differs(store: Store) -> None:
    """A late executor ended its copy after the owner had accepted the copy of another one."""
    accepted = store.holds(0, 9)
    store.manifest(accepted)
    store.holds(0, 9, content=bytes((accepted.segment_id.id.int,)))
    plan = store.plan()
    assert (live(plan), plan.unnamed) == ([(0, 9)], [])
    assert "another segment has the same content" in plan.dropped[0]
    store.holds(0, 9)
    assert f"it has offsets of segment {accepted.segment_id.id}: it is not known which one counts" in refused(store)


def test_two_contents_for_one_range_are_refused(store: Store) -> None:
    store.holds(0, 9)
    store.holds(0, 9)
    assert "it is not known which one counts" in refused(store)
    store.manifest()
    assert "it is not known which one counts" in refused(store)


@pytest.mark.parametrize(("epoch", "is_same_log"), [(0, True), (1, False)])
def test_an_overlap_with_what_is_accepted_needs_the_same_epochs(store: Store, epoch: int, is_same_log: bool) -> None:
    """An owner in doubt goes on copying at the broker's log start, and writes no manifest."""
    store.manifest(store.holds(0, 9, epoch=0))
    store.holds(5, 14, epoch=epoch)
    if is_same_log:
        assert live(store.plan()) == [(0, 9), (5, 14)]
    else:
        assert "has offsets of other segments" in refused(store)


def test_missing_objects_are_refused(store: Store) -> None:
    lost, last = store.holds(10, 19), store.holds(20, 29)
    store.manifest(store.holds(0, 9), lost, last)
    store.loses(lost)
    assert "both its objects are missing" in refused(store)
    store.found.segments[last.segment_id.id].log_bytes = None
    assert "its .log object is missing" in refused(store)
    store.found.segments[last.segment_id.id].log_bytes = 1
    assert "its .log object has 1 bytes" in refused(store)
    store.found.segments[last.segment_id.id].indexes = "torn"
    assert "cannot be read: torn" in refused(store)
    store.found.segments[last.segment_id.id].indexes = None
    assert "its .indexes object is missing" in refused(store)


def test_a_hole_before_what_no_manifest_names_is_refused(store: Store) -> None:
    store.manifest(store.holds(0, 9))
    store.holds(15, 19)
    assert "offsets from 10 on are missing" in refused(store)
    store.manifest(store.holds(0, 9), log_start=15)
    assert all("missing before" not in line for line in store.plan().refused)


def test_a_hole_between_the_log_start_and_the_first_segment_is_refused(store: Store) -> None:
    store.holds(15, 19)
    store.manifest(log_start=10)
    assert "offsets from 10 on are missing" in refused(store)
    store.manifest(log_start=15)
    assert store.plan().refused == []


def test_an_unreadable_manifest_is_refused(store: Store) -> None:
    store.holds(0, 9)
    store.found.manifest = "a wrong checksum"
    assert "which are dead: a wrong checksum" in refused(store)


def test_a_manifest_that_describes_something_else_is_refused(store: Store) -> None:
    store.manifest(replace(store.holds(0, 9), end_offset=8))
    assert "describe it differently" in refused(store)


def test_epochs_that_fall_are_refused(store: Store) -> None:
    store.holds(0, 9, epoch=4)
    store.holds(10, 19, epoch=3)
    assert "begins in leader epoch 3, after epoch 4" in refused(store)


def replayed(plan: PartitionPlan, folder: Path) -> RemoteLogMetadataStateWriter:
    events = []
    for offset, (key, value) in enumerate(records_of(plan, "writer", 1)):
        assert value is not None
        events.append(MetadataEvent(offset, 1, decode_key(key), decode_value(value)))
    state = RemoteLogMetadataStateWriter.open(
        folder, StateIdentity("c", UUID(int=1), 1), wall_clock_ms=lambda: 0, map_size_bytes=1 << 20
    )
    state.apply([PartitionRead(0, events, len(events))])
    return state


def test_another_history_stays_cut_off(store: Store, tmp_path: Path) -> None:
    old, new = store.holds(0, 19), store.holds(0, 9, epoch=1)
    store.manifest(old, new, cuts=(Cut(1, 0, 5, is_proved=False),))
    plan = store.plan()
    assert len(live(plan)) == 2
    state = replayed(plan, tmp_path)
    try:
        assert [each.is_proved for each in state.cuts(PARTITION)] == [False]
        found = {each.segment_id.id: each.cut_at for each in state.list_remote_log_segments(PARTITION)}
        assert found == {old.segment_id.id: 0, new.segment_id.id: None}
        assert state.remote_end_offset(PARTITION) == 9
    finally:
        state.close()


def test_replay_makes_of_the_records_what_was_accepted(store: Store, tmp_path: Path) -> None:
    cut, deeper, last = store.holds(0, 19), store.holds(20, 39), store.holds(16, 29, epoch=1)
    store.manifest(cut, deeper, last, log_start=4, cuts=(Cut(1, 16, 5),))
    plan = store.plan()
    assert len(live(plan)) == 3
    state = replayed(plan, tmp_path)
    try:
        assert state.log_start_offset(PARTITION) == 4
        found = {each.segment_id.id: each for each in state.list_remote_log_segments(PARTITION)}
        assert {uuid: each.cut_at for uuid, each in found.items()} == {
            cut.segment_id.id: 16,
            deeper.segment_id.id: 16,
            last.segment_id.id: None,
        }
        assert all(each.custom_metadata == b"as recorded" for each in found.values())
        for offset, wanted in ((0, cut), (15, cut), (16, last), (29, last)):
            holder = state.remote_log_segment_metadata(PARTITION, offset)
            assert holder is not None
            assert holder.segment_id == wanted.segment_id
        assert state.remote_log_segment_metadata(PARTITION, 30) is None
    finally:
        state.close()
    [config] = tier_configs_of([plan, plan], "writer", 1)
    assert (config.topic_id_partition.partition, config.config) == (0, {"local.retention.ms": "5"})


def test_the_longest_total_retention_of_all_manifests_is_rebuilt() -> None:
    """A manifest that was not written again has an older total."""
    old, new, none = (
        PartitionPlan(replace(PARTITION, partition=number), has_manifest=True, tier_config=config)
        for number, config in enumerate(
            [{RETENTION_MINUTES: "30", "local.retention.ms": "5"}, {RETENTION_MINUTES: "90"}, {}]
        )
    )
    [config] = tier_configs_of([old, new], "writer", 1)
    assert config.config == {RETENTION_MINUTES: "90", RETENTION_BYTES: "-1", "local.retention.ms": "5"}
    [config] = tier_configs_of([none, old], "writer", 1)
    assert config.config == {RETENTION_MINUTES: "-1", RETENTION_BYTES: "-1", "local.retention.ms": "5"}
    [config] = tier_configs_of([old], "writer", 1)
    assert config.config == old.tier_config


@pytest.mark.parametrize("other", [{}, {"remote.storage.enable": "true", "local.retention.ms": "5"}])
def test_a_deletion_that_one_manifest_does_not_ask_for_is_not_rebuilt(other: dict[str, str]) -> None:
    """The user may have taken the request back after the owner of the other partition had written its manifest."""
    asks = {"remote.storage.enable": "false", "remote.log.delete.on.disable": "true"}
    asking, keeping = (
        PartitionPlan(replace(PARTITION, partition=number), has_manifest=True, tier_config=config)
        for number, config in enumerate([asks, other])
    )
    assert [each.config for each in tier_configs_of([asking, keeping], "writer", 1)] == ([other] if other else [])
    [config] = tier_configs_of([asking, asking], "writer", 1)
    assert config.config == asks


def test_a_pause_counts_if_any_manifest_has_it() -> None:
    """The store may have refused the others since. A pause too many costs nothing, and an operator ends it."""
    paused = {TierWork.EXPIRING.key: "true", "local.retention.ms": "1000"}
    old, none, new = (
        PartitionPlan(replace(PARTITION, partition=number), has_manifest=True, tier_config=config)
        for number, config in enumerate([{"local.retention.ms": "60000"}, {}, paused])
    )
    for plans in ([old, new], [new, old], [none, new, old]):
        [config] = tier_configs_of(plans, "writer", 1)
        assert config.config[TierWork.EXPIRING.key] == "true"
        assert TierWork.TRIMMING.key not in config.config
