"""Whole rounds of a partition whose metadata was lost, and an operator accepts that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.attempts import batches, whole_rounds
from tests.support.tiers.segment_metadata import copied
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.topic_policy import TierWork
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_log import Tenure
from tiers.metadata.remote_log import RemoteLog
from tiers.model.log_start import LogGap, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.history.acceptance import may_be_in_doubt
from tiers.tasks.history.stored_facts import read_stored_facts
from tiers.tasks.partition_tasks import PartitionTasks


@pytest.mark.parametrize(
    ("missing", "gap"), [((), []), ((30, 60), [(30, 90)]), ((30,), [(30, 60)]), ((60,), [(60, 90)])]
)
async def test_an_acceptance_restores_what_the_store_has(
    bench: Workbench, missing: tuple[int, ...], gap: list[tuple[int, int]]
) -> None:
    """The broker has 90 to 99. The metadata lost all segments but the first. A gap takes the place of the others."""
    bench.log.append(*batches(0, 100))
    await bench.check_facts()
    await bench.copy_all()
    for lost in bench.segments[1:]:
        del bench.metadata.segments[lost.segment_id]
        if lost.start_offset in missing:
            await bench.store.delete_log_segment_data(lost)
    bench.log.log_start_offset = 90
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(90, 0))
    bench.restart()
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))
    await whole_rounds(bench, tasks, 2)
    assert (bool(tasks.doubt), await in_doubt(bench)) == (True, True)
    assert await bench.accept() == []
    await whole_rounds(bench, tasks, 4)
    assert not await in_doubt(bench)
    assert (tasks.doubt, bench.state.gaps(PARTITION)) == ("", gap)
    assert RemoteLog(bench.state, PARTITION).lost_trim(0) is None
    assert [start for start, _ in bench.finished] == [start for start in (0, 30, 60, 90) if start not in missing]


async def in_doubt(bench: Workbench) -> bool:
    found = await read_stored_facts(bench.store, "cluster", PARTITION)
    bounds = await bench.log.bounds(PARTITION, 1000)
    return await may_be_in_doubt(bench.metadata.log, bounds, await bench.log_start(), found, 1000)


async def stored(bench: Workbench, first: int, end: int, leader_epoch: int = 0) -> RemoteLogSegmentMetadata:
    """Stores a segment that the metadata does not know."""
    built = build_segment(bench.folder / f"{first}.built", batches(first, end, leader_epoch), first)
    segment = metadata_of(built, PARTITION)
    await bench.store.copy_log_segment_data(segment, built.log_segment_data(segment))
    return segment


async def test_an_acceptance_restores_a_cut_and_both_segments(bench: Workbench) -> None:
    bench.log.append(*batches(0, 70))
    await bench.check_facts()
    await bench.copy_all()
    bench.log.elect_unclean(40)
    bench.log.append(*batches(40, 140, leader_epoch=1))
    await bench.copy_all()
    await bench.check_facts()
    answers = [(each.start_offset, each.cut_at) for each in bench.segments]
    assert answers == [(0, None), (30, 40), (40, None), (70, None), (100, None)]
    for lost in bench.segments[1:]:
        del bench.metadata.segments[lost.segment_id]
    bench.metadata.recorded_cuts.clear()
    bench.log.log_start_offset = 100
    bench.restart()
    await bench.accept()
    await whole_rounds(bench, PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1)), 3)
    assert bench.state.gaps(PARTITION) == []
    assert [(each.start_offset, each.cut_at) for each in bench.segments][:4] == answers[:4]
    assert all(each.is_finished for each in bench.state.stored_segments(PARTITION))


async def test_an_acceptance_restores_a_segment_that_a_lost_cut_voids(bench: Workbench) -> None:
    """The metadata lost its end: a CUT, and what was copied behind it. The segment that the CUT cuts is known."""
    bench.log.append(*batches(0, 70))
    await bench.check_facts()
    await bench.copy_all(replace(POLICY, segment_bytes=1700))
    [cut] = bench.segments
    bench.log.elect_unclean(20)
    bench.log.append(*batches(20, 130, leader_epoch=1))
    await bench.copy_all()
    await bench.check_facts()
    answers = [(each.start_offset, each.cut_at) for each in bench.segments]
    assert answers == [(0, 20), (20, None), (50, None), (80, None)]
    bench.metadata.segments = {cut.segment_id: bench.metadata.segments[cut.segment_id]}
    bench.metadata.recorded_cuts.clear()
    bench.log.log_start_offset = 100
    bench.restart()
    assert await bench.accept() == []
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))
    await whole_rounds(bench, tasks, 3)
    assert tasks.doubt == ""
    assert [(each.start_offset, each.cut_at) for each in bench.segments][:4] == answers


@pytest.mark.parametrize(("has_segment", "reason"), [(True, LogStartReason.RETENTION), (False, LogStartReason.USER)])
async def test_an_acceptance_restores_the_gaps_and_log_starts_of_the_facts(
    bench: Workbench, has_segment: bool, reason: LogStartReason
) -> None:
    """A segment that only the store knows takes the place of a gap. Retention finds its own log start again."""
    bench.log.append(*batches(0, 90))
    await bench.copy_all()
    bench.log.append(*batches(90, 200))
    bench.log.log_start_offset = 120
    await bench.metadata.put_log_gap(PARTITION, LogGap(90, 120), 0)
    await bench.record_log_start(10, reason=reason)
    await bench.copy_all()
    await bench.check_facts()
    await bench.facts_task.store()
    if has_segment:
        await stored(bench, 90, 100)
    for records in (bench.metadata.recorded_gaps, bench.metadata.all_log_starts):
        records.clear()
    bench.metadata.fresh = False
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await bench.accept()
    bench.metadata.fresh = True
    assert await bench.accept() == []
    assert bench.state.gaps(PARTITION) == [LogGap(90, 120)] * (not has_segment)
    restored = [start.offset for start in bench.state.log_starts(PARTITION)]
    assert restored == [10] * (reason is LogStartReason.USER)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_an_acceptance_restores_what_holds_back_deletions(bench: Workbench, is_lost: bool) -> None:
    """The total retention that the metadata has may be an earlier one, and a pause may be lost."""
    longest = {RETENTION_MINUTES: "90", RETENTION_BYTES: "-1", TierWork.EXPIRING.key: "true"}
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", longest)
    await bench.check_facts()
    await bench.facts_task.store()
    bench.metadata.is_position_confirmed = not is_lost
    known = {RETENTION_MINUTES: "30", RETENTION_BYTES: "-1", TierWork.TRIMMING.key: "true"}
    bench.metadata.tier_configs[PARTITION] = known
    assert await bench.accept() == []
    assert bench.state.topic_tier_config(PARTITION.topic_id) == (known | longest if is_lost else known)


async def test_a_doubt_about_one_hole_records_no_gap_over_the_next(bench: Workbench) -> None:
    bench.log.append(*batches(0, 40))
    await bench.check_facts()
    await stored(bench, 30, 60)
    [path] = (bench.folder / "remote").rglob("*.indexes")
    raw = path.read_bytes()
    path.write_bytes(raw[:5] + bytes([raw[5] + 1]) + raw[6:])
    await bench.copy_all()
    segment = await stored(bench, 60, 90)
    await copied(bench.metadata, segment)
    bench.restart()
    bench.log.append(*batches(40, 300))
    bench.log.log_start_offset = 120
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))
    await bench.accept()
    await whole_rounds(bench, tasks, 3)
    assert tasks.doubt
    assert bench.state.gaps(PARTITION) == []


async def test_an_acceptance_records_a_gap_over_a_segment_of_another_history(bench: Workbench) -> None:
    bench.log.leader_epoch = 4
    bench.log.append(*batches(0, 300, leader_epoch=4))
    await bench.check_facts()
    await bench.record_log_start(0)
    await stored(bench, 30, 60, leader_epoch=5)
    bench.log.log_start_offset = 60
    await bench.copy_all()
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))
    await whole_rounds(bench, tasks, 1)
    assert tasks.doubt
    await bench.accept()
    await whole_rounds(bench, tasks, 5)
    assert tasks.doubt == ""
    assert bench.state.gaps(PARTITION) == [LogGap(30, 60)]
    assert RemoteLog(bench.state, PARTITION).attempt_at_head(0, 60) is None
    assert RemoteLog(bench.state, PARTITION).earliest(60) == 60
