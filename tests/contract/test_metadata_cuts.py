"""What every `RemoteLogMetadataManager` promises about CUTs."""

from __future__ import annotations

import pytest

from tests.support.tiers.segment_metadata import copied, segment, to
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import Cut
from tiers.model.segment_metadata import RemoteLogSegmentState as State


@pytest.mark.parametrize(("trim", "left"), [((40, 2), None), ((60, 2), (60, 2)), ((40, 3), (40, 3))])
async def test_a_log_start_ends_with_the_trim_whose_records_it_deleted(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition, trim: tuple[int, int], left: tuple[int, int] | None
) -> None:
    """Without the log start, the lack of these records would look like lost metadata."""
    start = LogStart(50, 2, LogStartReason.USER)
    await manager.put_log_start(partition, start)
    await manager.put_local_log_start(partition, OffsetAndEpoch(*trim))
    await manager.end_log_start(partition, start)
    assert manager.state.local_log_start(partition) == left
    assert manager.state.is_known(partition) == (left is not None)


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_cut_ends_the_trim_that_it_voids(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition, is_named: bool
) -> None:
    """It voids no later one. A log start may be of the leader's own history, so only an operator's CUT ends it."""
    trim, start = OffsetAndEpoch(50, 2), LogStart(120, 1, LogStartReason.USER)
    await manager.put_log_start(partition, start)
    for each in (OffsetAndEpoch(70, 1), trim):
        await manager.put_local_log_start(partition, each)
        assert manager.state.local_log_start(partition) == each
    for leader_epoch, offset, left in ((2, 20, trim), (3, 50, trim), (3, 49, None)):
        if is_named:
            await manager.put_named_cut(partition, Cut(leader_epoch, offset, 0))
        else:
            await manager.put_cut(partition, leader_epoch, offset)
        assert manager.state.local_log_start(partition) == left
    assert manager.state.log_starts(partition) == ([] if is_named else [start])
    await manager.put_local_log_start(partition, trim)
    assert manager.state.local_log_start(partition) == trim


async def test_an_operators_cut_ends_the_log_starts_of_the_void_history(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    kept, ended = LogStart(40, 1, LogStartReason.USER), LogStart(70, 5, LogStartReason.RETENTION)
    await manager.put_log_start(partition, LogStart(0, 0, LogStartReason.SEEN))
    await manager.put_log_start(partition, kept)
    await manager.put_log_start(partition, ended)
    for leader_epoch, offset, left in ((5, 40, [ended, kept]), (6, 40, [kept]), (2, 0, [])):
        await manager.put_named_cut(partition, Cut(leader_epoch, offset, 0))
        assert manager.state.log_starts(partition) == left
    assert [(cut.leader_epoch, cut.offset, cut.is_proved) for cut in manager.state.cuts(partition)] == [
        (2, 0, True),
        (5, 40, True),
        (6, 40, True),
    ]
    assert manager.state.is_known(partition)


async def test_a_cut_removes_no_other_one(manager: RemoteLogMetadataManager, partition: TopicIdPartition) -> None:
    assert list(manager.state.cuts(partition)) == []
    for leader_epoch, offset in ((2, 60), (1, 130), (2, 50)):
        await manager.put_cut(partition, leader_epoch, offset, is_proved=offset == 50)
    cuts = [(cut.leader_epoch, cut.offset, cut.is_proved) for cut in manager.state.cuts(partition)]
    assert cuts == [(1, 130, False), (2, 50, True), (2, 60, False)]
    await manager.put_named_cut(partition, Cut(2, 60, 0))
    assert [cut.is_proved for cut in manager.state.cuts(partition)] == [False, True, True]


async def test_a_cut_voids_what_was_copied_in_an_earlier_epoch(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    first, second = segment(partition, 0, 99, epoch=1), await copied(manager, segment(partition, 100, 199, epoch=2))
    await manager.add_remote_log_segment_metadata(first)
    await manager.put_cut(partition, 3, 60)
    await manager.update_remote_log_segment_metadata(to(first, State.COPY_SEGMENT_FINISHED))
    assert manager.state.remote_end_offset(partition) == 59
    third = await copied(manager, segment(partition, 60, 129, epoch=3))
    answering = [manager.state.remote_log_segment_metadata(partition, offset) for offset in (59, 60, 129, 130)]
    assert [None if each is None else each.segment_id for each in answering] == [
        first.segment_id,
        third.segment_id,
        third.segment_id,
        None,
    ]
    assert manager.state.remote_end_offset(partition) == 129
    listed = {each.segment_id: each for each in manager.state.list_remote_log_segments(partition)}
    assert [each for each in listed if listed[each].is_cut_off] == [second.segment_id]
    assert listed[first.segment_id].valid_end_offset == 59
    for state in (State.DELETE_SEGMENT_STARTED, State.DELETE_SEGMENT_FINISHED):
        await manager.update_remote_log_segment_metadata(to(second, state))
    assert manager.state.remote_end_offset(partition) == 129
