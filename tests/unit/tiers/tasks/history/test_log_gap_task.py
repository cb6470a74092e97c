"""Records that the broker removed before they were copied: a gap is recorded, and costs nothing but itself."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench, with_retention
from tiers.errors import (
    OwnershipLostError,
    RemoteLogMetadataNotReadyError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.tenure import Tenure
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import marker_key
from tiers.storage.remote_storage_manager import StoredObject
from tiers.tasks.partition_tasks import PartitionTasks

GAP_ALARM_MS = 30_000


def batches(first: int, count: int, leader_epoch: int = 0) -> list[bytes]:
    """Batches of ten records and about 300 bytes: three fill a segment of the test policy."""
    return [batch_of(first + 10 * n, 10, value_bytes=15, leader_epoch=leader_epoch) for n in range(count)]


async def copy_to_the_end(bench: Workbench) -> None:
    await bench.copy_all()
    bench.now_ms += POLICY.segment_ms
    await bench.copy_all()


async def with_removed_records(bench: Workbench, local_log_start: int = 120) -> None:
    """Offsets 0 to 89 are remote. The broker has 120 to 199, and removed the rest."""
    bench.log.append(*batches(0, 9))
    await copy_to_the_end(bench)
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    await bench.check_facts()
    await bench.facts_task.store()
    bench.log.append(*batches(90, 11))
    bench.log.log_start_offset = local_log_start


async def with_removed_records_after(bench: Workbench, first: int) -> None:
    """Three segments more from `first` on, then a gap of 30 records."""
    bench.log.append(*batches(first, 9))
    await copy_to_the_end(bench)
    await bench.check_facts()
    bench.log.append(*batches(first + 90, 9))
    bench.log.log_start_offset = first + 120


async def copy_start(bench: Workbench) -> int | None:
    return await bench.gap_task.copy_start(await bench.log.bounds(PARTITION, 1000), await bench.log_start())


async def doubt(bench: Workbench) -> str:
    """Returns the owner's doubt about the offsets below 120. Copying goes on behind them."""
    assert await copy_start(bench) == 120
    return str(bench.gap_task.doubt or "")


async def until_recorded(bench: Workbench) -> int | None:
    assert await copy_start(bench) is None
    bench.now_ms += GAP_ALARM_MS
    return await copy_start(bench)


def alarms(bench: Workbench) -> float:
    return bench.metric("remote_log_alarms_total", topic="orders", reason="gap")


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_gap_whose_write_failed_is_told_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """The leader of the metadata partition stops, and its successor may have the record."""
    await with_removed_records(bench)
    put = bench.metadata.put_log_gap

    async def put_without_answer(partition: TopicIdPartition, gap: LogGap, leader_epoch: int) -> None:
        monkeypatch.setattr(bench.metadata, "put_log_gap", put)
        if is_written:
            await put(partition, gap, leader_epoch)
        raise RemoteLogMetadataNotReadyError("the record may be lost")

    monkeypatch.setattr(bench.metadata, "put_log_gap", put_without_answer)
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await until_recorded(bench)
    assert alarms(bench) == 0
    assert await copy_start(bench) == 120
    assert await copy_start(bench) == 120
    assert alarms(bench) == 1


async def test_a_gap_that_ends_at_once_is_told(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its write failed but took effect, and the log start passes the gap before the next round."""
    await with_removed_records(bench)
    put = bench.metadata.put_log_gap

    async def put_without_answer(partition: TopicIdPartition, gap: LogGap, leader_epoch: int) -> None:
        await put(partition, gap, leader_epoch)
        raise RemoteLogMetadataNotReadyError("the record may be lost")

    monkeypatch.setattr(bench.metadata, "put_log_gap", put_without_answer)
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await until_recorded(bench)
    bounds = await bench.log.bounds(PARTITION, 1000)
    assert await bench.gap_task.copy_start(bounds, bounds.log_start_offset) == 120
    assert bench.state.gaps(PARTITION) == []
    assert alarms(bench) == 1


async def test_a_gap_is_recorded_and_copying_goes_on_behind_it(bench: Workbench) -> None:
    await with_removed_records(bench)
    await bench.copy_all()
    bench.now_ms += GAP_ALARM_MS - 1
    await bench.copy_all()
    assert bench.state.gaps(PARTITION) == []
    bench.now_ms += 1
    await bench.copy_all()
    assert bench.state.gaps(PARTITION) == [LogGap(90, 120)]
    assert bench.finished[3:] == [(120, 149), (150, 179)]
    assert alarms(bench) == 1


async def test_a_gap_moves_no_log_start_and_deletes_nothing(bench: Workbench) -> None:
    await with_removed_records(bench)
    await until_recorded(bench)
    await bench.copy_all()
    assert await bench.expire(POLICY) == 0
    assert bench.state.log_starts(PARTITION) == []
    assert bench.state.log_start_offset(PARTITION) == 0
    assert bench.finished[0] == (0, 29)
    assert bench.log.trims == []


async def test_records_behind_a_gap_are_trimmed_as_ever(bench: Workbench) -> None:
    await with_removed_records(bench)
    await until_recorded(bench)
    await bench.copy_all()
    bench.now_ms += 60_000
    assert await bench.trim(with_retention(local_retention_bytes=0)) == 150


async def test_retention_passes_the_gap_and_the_gap_ends(bench: Workbench) -> None:
    await with_removed_records(bench)
    await until_recorded(bench)
    await bench.copy_all()
    sizes = [each.segment_size_bytes for each in bench.segments]
    await bench.expire(with_retention(retention_bytes=sum(sizes[3:])))
    assert bench.state.log_start_offset(PARTITION) == 90
    await copy_start(bench)
    assert bench.state.gaps(PARTITION) == [LogGap(90, 120)]
    await bench.expire(with_retention(retention_bytes=sizes[4]))
    assert bench.state.log_start_offset(PARTITION) == 150
    await copy_start(bench)
    assert bench.state.gaps(PARTITION) == []
    assert alarms(bench) == 1


async def test_a_deletion_that_is_recorded_late_is_no_gap(bench: Workbench) -> None:
    await with_removed_records(bench)
    for _ in range(2):
        assert await copy_start(bench) is None
        bench.now_ms += GAP_ALARM_MS // 2
    await bench.record_log_start(120)
    assert await copy_start(bench) == 120
    assert bench.state.gaps(PARTITION) == []
    assert alarms(bench) == 0


async def test_records_removed_before_the_first_copy_are_no_gap(bench: Workbench) -> None:
    """Without a record of what the owner saw, proxies cannot know whether metadata was lost, and clients wait."""
    bench.log.append(*batches(0, 9))
    bench.log.log_start_offset = 30
    for _ in range(2):
        assert await copy_start(bench) == 30
        assert bench.state.gaps(PARTITION) == []
        assert bench.metadata.all_log_starts[PARTITION] == [LogStart(30, 0, LogStartReason.SEEN)]


async def test_a_gap_grows_with_the_brokers_retention_without_a_second_alarm(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    await with_removed_records(bench)
    assert await until_recorded(bench) == 120
    bench.log.log_start_offset = 160
    assert await copy_start(bench) == 160
    assert bench.state.gaps(PARTITION) == [LogGap(90, 160)]
    assert alarms(bench) == 1
    bench.log.leader_epoch, bench.log.log_start_offset = 1, 150
    assert await copy_start(bench) == 150
    grown = [record for record in caplog.records if record.getMessage() == "a gap of the log has grown"]
    assert [(record.__dict__["first_offset"], record.__dict__["next_offset"]) for record in grown] == [(90, 160)]


async def test_a_gap_shrinks_when_a_new_leader_has_more(bench: Workbench) -> None:
    await with_removed_records(bench)
    assert await until_recorded(bench) == 120
    bench.log.leader_epoch, bench.log.log_start_offset = 1, 110
    assert await copy_start(bench) == 110
    assert bench.state.gaps(PARTITION) == [LogGap(90, 110)]
    bench.log.leader_epoch, bench.log.log_start_offset = 2, 60
    assert await copy_start(bench) == 90
    assert bench.state.gaps(PARTITION) == []


async def test_leader_epochs_are_handed_on_over_a_gap(bench: Workbench) -> None:
    bench.log.append(*batches(0, 3), *batches(30, 6, leader_epoch=3))
    bench.log.leader_epoch = 3
    await copy_to_the_end(bench)
    await bench.check_facts()
    bench.log.append(*batches(90, 3, leader_epoch=5), *batches(120, 6, leader_epoch=7))
    bench.log.leader_epoch, bench.log.log_start_offset = 7, 120
    await until_recorded(bench)
    await bench.copy_all()
    newest = bench.segments[-1]
    stored = decode_indexes_object(await bench.store.fetch_indexes(newest), newest)
    expected = LeaderEpochEntry(0, 0), LeaderEpochEntry(3, 30), LeaderEpochEntry(7, 120)
    assert stored.indexes.leader_epochs == expected


@pytest.mark.parametrize("is_same_place", [True, False])
async def test_a_gap_needs_the_right_place(bench: Workbench, is_same_place: bool) -> None:
    bench.log.append(*batches(0, 9))
    await copy_to_the_end(bench)
    bench.log.append(*batches(90, 11))
    bench.log.log_start_offset = 120
    if is_same_place:
        assert await until_recorded(bench) == 120
    else:
        await bench.store.delete_object(marker_key("cluster"))
        with pytest.raises(RemoteStorageError, match="another place"):
            await copy_start(bench)
    assert bench.state.gaps(PARTITION) == [LogGap(90, 120)] * is_same_place


async def test_no_gap_is_recorded_when_the_metadata_topic_lost_records(bench: Workbench) -> None:
    await with_removed_records(bench)
    bench.metadata.is_position_confirmed = False
    bench.restart()
    assert "lost records since" in await doubt(bench)
    assert bench.state.gaps(PARTITION) == []


async def test_no_gap_is_recorded_over_what_was_trimmed(bench: Workbench) -> None:
    await with_removed_records(bench)
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(120, 0))
    assert "trimmed to 120" in await doubt(bench)


async def test_the_trim_of_another_history_says_nothing(bench: Workbench) -> None:
    """The broker was emptied: its log begins anew in a later leader epoch, and nothing is remote any more."""
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(500, 0))
    bench.log.leader_epoch = 2
    bench.log.append(*batches(0, 9, leader_epoch=2))
    bench.log.log_start_offset = 30
    assert await copy_start(bench) == 30


async def test_a_trim_of_what_a_user_deleted_since_is_no_lost_metadata(bench: Workbench) -> None:
    """The user deleted in a history that an unclean election cut off: the leader denies the log start."""
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(60, 0))
    await bench.record_log_start(150)
    bench.log.append(*batches(0, 9))
    bench.log.elect_unclean(80)
    bench.log.log_start_offset = 60
    assert await copy_start(bench) == 60


async def test_the_trim_of_another_history_than_the_remote_one_is_refused(bench: Workbench) -> None:
    """Behind the gap both histories are one. Before it the leader has other records than the remote tier."""
    await with_removed_records(bench)
    await until_recorded(bench)
    await bench.copy_all()
    bench.now_ms += 60_000
    bench.log.log_start_offset = 40
    bench.log.epoch_answer = EpochEndOffset(0, 50)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="from offset 50 on"):
        await bench.trim(with_retention(local_retention_bytes=0))
    assert bench.log.trims == []


async def test_an_operator_accepts_a_gap_though_metadata_was_lost(bench: Workbench) -> None:
    await with_removed_records(bench)
    bench.metadata.is_position_confirmed = False
    bench.restart()
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(120, 0))
    assert await doubt(bench)
    assert await bench.accept() == []
    bench.metadata.is_position_confirmed = True
    await bench.check_facts()
    assert await until_recorded(bench) == 120
    assert bench.state.gaps(PARTITION) == [LogGap(90, 120)]
    assert RemoteLog(bench.state, PARTITION).lost_trim(90) is None


async def test_no_gap_is_recorded_while_the_store_does_not_answer(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_removed_records(bench)

    async def get_object(key: str) -> bytes:
        raise RetriableRemoteStorageError("503")

    monkeypatch.setattr(bench.store, "get_object", get_object)
    for _ in range(2):
        with pytest.raises(RetriableRemoteStorageError):
            await copy_start(bench)
        bench.now_ms += GAP_ALARM_MS
    assert bench.state.gaps(PARTITION) == []


async def test_only_the_owner_records_a_gap(bench: Workbench) -> None:
    await with_removed_records(bench)
    assert await copy_start(bench) is None
    bench.now_ms += GAP_ALARM_MS
    bench.metadata.owned = False
    with pytest.raises(OwnershipLostError):
        await copy_start(bench)
    assert bench.state.gaps(PARTITION) == []


async def test_an_unclean_election_ends_the_gap_of_the_history_that_it_cut_off(bench: Workbench) -> None:
    await with_removed_records(bench)
    await until_recorded(bench)
    bench.log.log_start_offset = 0
    bench.log.elect_unclean(50)
    bench.log.append(*batches(50, 10, leader_epoch=1))
    await copy_to_the_end(bench)
    assert bench.state.gaps(PARTITION) == []
    assert bench.state.remote_end_offset(PARTITION) == 139


async def test_the_bounds_that_a_gap_is_judged_by_are_the_leaders(bench: Workbench) -> None:
    await with_removed_records(bench)
    earlier = LocalLogBounds(0, 200, 200, 0)
    assert await bench.gap_task.copy_start(earlier, 0) == 90
    assert bench.state.gaps(PARTITION) == []


async def test_records_of_a_gap_that_a_broker_has_again_raise_an_alarm(bench: Workbench) -> None:
    """They end the trimming: the last segment before the gap stays local, until the total retention removes it."""
    await with_removed_records(bench)
    await until_recorded(bench)
    await copy_to_the_end(bench)
    bench.log.log_start_offset = 0
    bench.now_ms += bench.services.settings.remote_log.visible_after_ms
    trimmed = [await bench.trim(with_retention(local_retention_bytes=0)) for _ in range(2)]
    assert trimmed == [60, None]
    await PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 0)).survey()
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="uncopied-beginning") == 1
    bench.log.log_start_offset = 120
    await PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 0)).survey()
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="uncopied-beginning") == 1


async def with_lost_segments(bench: Workbench, *lost: int) -> None:
    """Offsets 0 to 89 are copied. The broker has 90 to 99. The metadata lost the segments with these numbers."""
    bench.log.append(*batches(0, 10))
    await bench.copy_all()
    bench.log.log_start_offset = 90
    for segment in [bench.segments[number] for number in lost]:
        del bench.metadata.segments[segment.segment_id]


async def test_the_store_has_segments_at_the_head_that_the_metadata_lost(bench: Workbench) -> None:
    """The trim shows every process that the log does not begin at the local log. Copying goes on."""
    await with_lost_segments(bench, 0, 1, 2)
    for _ in range(2):
        assert await copy_start(bench) == 90
        assert "trimmed to 90" in str(bench.gap_task.doubt)
        assert bench.state.local_log_start(PARTITION) == (90, 0)
    assert bench.state.gaps(PARTITION) == []
    await copy_to_the_end(bench)
    assert bench.finished == [(90, 99)]


async def test_an_acceptance_finishes_the_segments_at_the_head(bench: Workbench) -> None:
    await with_lost_segments(bench, 0, 1, 2)
    assert await copy_start(bench) == 90
    await bench.accept()
    await bench.check_facts()
    await bench.copy()
    assert bench.gap_task.doubt is None
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]


async def test_a_store_that_cannot_be_listed_at_the_head_is_asked_less_and_less(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's answers pass meanwhile."""
    await with_lost_segments(bench, 0, 1, 2)
    listed, list_objects = [], bench.store.list_objects

    def refused(prefix: str) -> AsyncIterator[StoredObject]:
        listed.append(bench.now_ms - began_ms)
        raise RetriableRemoteStorageError("503")

    monkeypatch.setattr(bench.store, "list_objects", refused)
    began_ms = bench.now_ms
    for _ in range(8):
        assert await copy_start(bench) == 90
        assert (bench.gap_task.doubt, bench.state.local_log_start(PARTITION)) == (None, None)
        bench.now_ms += 30_000
    assert listed == [0, 60_000, 180_000]
    monkeypatch.setattr(bench.store, "list_objects", list_objects)
    bench.now_ms += 240_000
    assert await copy_start(bench) == 90
    assert bench.gap_task.doubt is not None


async def test_a_hole_between_segments_becomes_a_gap(bench: Workbench) -> None:
    """Copying does not wait for it."""
    await with_lost_segments(bench)
    middle = bench.segments[1]
    await bench.store.delete_log_segment_data(middle)
    del bench.metadata.segments[middle.segment_id]
    await bench.check_facts()
    assert await copy_start(bench) == 90
    bench.now_ms += GAP_ALARM_MS
    assert await copy_start(bench) == 90
    assert bench.state.gaps(PARTITION) == [LogGap(30, 60)]
    assert (alarms(bench), bench.gap_task.doubt) == (1, None)


async def test_a_hole_whose_segment_the_store_has_becomes_no_gap(bench: Workbench) -> None:
    await with_lost_segments(bench, 1)
    for _ in range(2):
        assert await copy_start(bench) == 90
        assert "the metadata does not know" in str(bench.gap_task.doubt)
        bench.now_ms += GAP_ALARM_MS
    assert bench.state.gaps(PARTITION) == []
