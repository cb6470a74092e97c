"""Records that the broker removed before they were copied: a gap is recorded, and costs nothing but itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.attempts import batches
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench, copied
from tiers.errors import (
    MetadataLostError,
    OwnershipLostError,
    RemoteLogMetadataNotReadyError,
    RetriableRemoteStorageError,
)
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.storage.object_key import marker_key
from tiers.storage.remote_storage_manager import StoredObject
from tiers.tasks.history.log_gap_task import MEMBER_RETURNS_WITHIN_MS

GAP_ALARM_MS = 30_000


async def copy_to_the_end(bench: Workbench) -> None:
    await bench.copy_all()
    bench.now_ms += POLICY.segment_ms
    await bench.copy_all()


async def with_removed_records(bench: Workbench, local_log_start: int = 120) -> None:
    """Offsets 0 to 89 are remote. The broker has 120 to 199, and removed the rest."""
    bench.log.append(*batches(0, 90))
    await copy_to_the_end(bench)
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    await bench.check_facts()
    await bench.facts_task.store()
    bench.log.append(*batches(90, 200))
    bench.log.log_start_offset = local_log_start


async def copy_start(bench: Workbench) -> int | None:
    bounds, log_start = await bench.log.bounds(PARTITION, 1000), await bench.log_start()
    is_known = await bench.gap_task.make_known(bounds, log_start)
    return await bench.gap_task.copy_start(bounds, log_start) if is_known else None


async def until_recorded(bench: Workbench) -> int | None:
    assert await copy_start(bench) is None
    bench.now_ms += GAP_ALARM_MS
    return await copy_start(bench)


def alarms(bench: Workbench) -> float:
    return bench.metric("remote_log_alarms_total", topic="orders", reason="gap")


@pytest.mark.parametrize("is_passed", [True, False])
@pytest.mark.parametrize("is_written", [True, False])
async def test_a_gap_whose_write_failed_is_told_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, is_written: bool, is_passed: bool
) -> None:
    """The leader of the metadata partition stops, and its successor may have the record.

    The log start may pass the gap before the next round."""
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
    bounds = await bench.log.bounds(PARTITION, 1000)
    for _ in range(2):
        assert await bench.gap_task.copy_start(bounds, bounds.log_start_offset if is_passed else 0) == 120
    assert alarms(bench) == (is_written or not is_passed)
    assert bench.state.gaps(PARTITION) == [LogGap(90, 120)] * (not is_passed)


async def test_a_gap_is_recorded_and_copying_goes_on_behind_it(bench: Workbench) -> None:
    await with_removed_records(bench)
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(90, 0))  # a trim of all that was copied
    await bench.copy_all()
    bench.now_ms += GAP_ALARM_MS - 1
    await bench.copy_all()
    assert bench.state.gaps(PARTITION) == []
    bench.now_ms += 1
    await bench.copy_all()
    assert bench.state.gaps(PARTITION) == [LogGap(90, 120)]
    assert bench.finished[3:] == [(120, 149), (150, 179)]
    assert alarms(bench) == 1


async def test_records_removed_before_the_first_copy_are_no_gap(bench: Workbench) -> None:
    """Without a record of what the owner saw, proxies cannot know whether metadata was lost, and clients wait."""
    bench.log.append(*batches(0, 90))
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


@pytest.mark.parametrize(("is_same_place", "is_proved"), [(True, False), (False, False), (False, True)])
async def test_a_gap_needs_the_right_place(bench: Workbench, is_same_place: bool, is_proved: bool) -> None:
    bench.log.append(*batches(0, 90))
    await copy_to_the_end(bench)
    if is_proved:
        await bench.check_facts()
    bench.log.append(*batches(90, 200))
    bench.log.log_start_offset = 120
    if is_same_place:
        assert await until_recorded(bench) == 120
    else:
        await bench.store.delete_object(marker_key("cluster"))
        assert await copy_start(bench) == 120, "copying goes on"
        assert bench.gap_task.doubt is None
    assert bench.state.gaps(PARTITION) == [LogGap(90, 120)] * is_same_place


@pytest.mark.parametrize(("is_trimmed", "doubt"), [(True, "trimmed to 120"), (False, "lost records since")])
async def test_no_gap_is_recorded_over_what_was_copied(bench: Workbench, is_trimmed: bool, doubt: str) -> None:
    await with_removed_records(bench)
    if is_trimmed:
        await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(120, 0))
    else:
        bench.metadata.is_position_confirmed = False
        bench.restart()
    assert await copy_start(bench) == 120, "copying goes on"
    assert doubt in str(bench.gap_task.doubt)
    assert bench.state.gaps(PARTITION) == []


async def test_the_trim_of_another_history_says_nothing(bench: Workbench) -> None:
    """The broker was emptied: its log begins anew in a later leader epoch, and nothing is remote any more."""
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(500, 0))
    bench.log.leader_epoch = 2
    bench.log.append(*batches(0, 90, leader_epoch=2))
    bench.log.log_start_offset = 30
    assert await copy_start(bench) == 30


async def test_only_the_owner_records_a_gap(bench: Workbench) -> None:
    await with_removed_records(bench)
    assert await copy_start(bench) is None
    bench.now_ms += GAP_ALARM_MS
    bench.metadata.owned = False
    with pytest.raises(OwnershipLostError):
        await copy_start(bench)
    assert bench.state.gaps(PARTITION) == []


async def with_lost_segments(bench: Workbench, *lost: int) -> None:
    """Offsets 0 to 89 are copied. The broker has 90 to 99. The metadata lost the segments with these numbers."""
    bench.log.append(*batches(0, 100))
    await bench.copy_all()
    bench.log.log_start_offset = 90
    for segment in [bench.segments[number] for number in lost]:
        del bench.metadata.segments[segment.segment_id]


@pytest.mark.parametrize("trimmed_to", [None, 60])
async def test_the_store_has_segments_at_the_head_that_the_metadata_lost(
    bench: Workbench, trimmed_to: int | None
) -> None:
    """The trim shows every process that the log does not begin at the local log. Copying goes on."""
    await with_lost_segments(bench, 0, 1, 2)
    if trimmed_to is not None:
        await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(trimmed_to, 0))
    for _ in range(2):
        assert await copy_start(bench) == 90
        assert "trimmed to" in str(bench.gap_task.doubt)
        assert bench.state.local_log_start(PARTITION) == (90, 0)
    assert bench.state.gaps(PARTITION) == []
    await copy_to_the_end(bench)
    assert bench.finished == [(90, 99)]


async def test_a_store_that_cannot_be_listed_at_the_head_is_asked_each_minute(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy waits for it. The broker's answers pass meanwhile."""
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
    assert listed == [0, 60_000, 120_000, 180_000]
    monkeypatch.setattr(bench.store, "list_objects", list_objects)
    bench.now_ms += 240_000
    assert await copy_start(bench) == 90
    assert bench.gap_task.doubt is not None


@pytest.mark.parametrize(
    ("lost", "starts", "most"), [((), (0, 30, 30, 31, 32, 32, 33), 2), ((1, 2), range(90, 190), 9)]
)
async def test_a_local_log_start_that_moves_costs_few_listings(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, lost: Sequence[int], starts: Sequence[int], most: int
) -> None:
    """Before the first copy, and in doubt."""
    if lost:
        await with_lost_segments(bench, *lost)
    else:
        await bench.record_log_start(0)
    bench.log.append(*batches(bench.log.end_offset, 200))
    listed, list_objects = [], bench.store.list_objects

    def counted(prefix: str) -> AsyncIterator[StoredObject]:
        listed.append(prefix)
        return list_objects(prefix)

    monkeypatch.setattr(bench.store, "list_objects", counted)
    for local_log_start in starts:
        bench.log.log_start_offset = local_log_start
        assert await copy_start(bench) == local_log_start
        assert (bench.gap_task.doubt is not None) is bool(lost)
        bench.now_ms += 20_000
    assert 1 < len(listed) <= most


async def test_two_holes_become_gaps_at_once(bench: Workbench) -> None:
    await with_lost_segments(bench)
    middle = bench.segments[1]
    await bench.store.delete_log_segment_data(middle)
    del bench.metadata.segments[middle.segment_id]
    bench.log.append(*batches(100, 200))
    bench.log.log_start_offset = 120
    assert await copy_start(bench) is None
    bench.now_ms += GAP_ALARM_MS
    assert await copy_start(bench) == 120
    assert bench.state.gaps(PARTITION) == [LogGap(30, 60), LogGap(90, 120)]
    assert (alarms(bench), bench.gap_task.doubt) == (2, None)


@pytest.mark.parametrize("is_proved", [True, False])
async def test_a_hole_whose_segment_the_store_has_becomes_no_gap(bench: Workbench, is_proved: bool) -> None:
    """Its record may be lost after the owner compared the metadata with the store."""
    await with_lost_segments(bench)
    if is_proved:
        await bench.check_facts()
    del bench.metadata.segments[bench.segments[1].segment_id]
    for _ in range(2):
        assert await copy_start(bench) == 90
        assert "the metadata does not know" in str(bench.gap_task.doubt)
        bench.now_ms += GAP_ALARM_MS
    assert bench.state.gaps(PARTITION) == []


async def test_copying_goes_on_behind_an_attempt_whose_member_may_return(bench: Workbench) -> None:
    """Its spool may have the only copy. The gap waits for it."""
    await with_removed_records(bench)
    built = build_segment(bench.folder / "attempt", batches(90, 120), 90)
    await bench.metadata.add_remote_log_segment_metadata(metadata_of(built, PARTITION))
    for _ in range(2):
        await bench.attempts.run(await bench.log.bounds(PARTITION, 1000), 0)
        bench.now_ms += bench.services.settings.remote_log.visible_after_ms
    for waited_ms, gaps in ((0, []), (MEMBER_RETURNS_WITHIN_MS - 1, []), (1, [LogGap(90, 120)])):
        bench.now_ms += waited_ms
        assert await copy_start(bench) == 120
        assert bench.state.gaps(PARTITION) == gaps


@pytest.mark.parametrize(("is_cut", "gaps"), [(False, [LogGap(30, 60)]), (True, [])])
async def test_an_attempt_of_another_history_leaves_the_earliest_offset_known(
    bench: Workbench, is_cut: bool, gaps: list[LogGap]
) -> None:
    bench.log.leader_epoch = 4
    bench.log.append(*batches(0, 300, 4))
    await bench.check_facts()
    await bench.record_log_start(0)
    bench.log.log_start_offset = 60
    await bench.copy_all()
    built = build_segment(bench.folder / "attempt", batches(30, 60, leader_epoch=5), 30)
    await bench.metadata.add_remote_log_segment_metadata(attempt := metadata_of(built, PARTITION))
    await bench.store.copy_log_segment_data(attempt, built.log_segment_data(attempt))
    if is_cut:
        bench.log.leader_epoch = 6
        await bench.metadata.put_cut(PARTITION, 6, 20)
    for _ in range(5):
        await bench.copy_all()
        bench.now_ms += 60_000
    void = [(30, 59)] * is_cut
    assert bench.finished[: len(void) + 1] == [*void, (60, 89)]
    assert bench.state.gaps(PARTITION) == gaps
    assert RemoteLog(bench.state, PARTITION).attempt_at_head(0, 60) is None


async def test_a_gap_is_recorded_over_an_attempt_that_a_cut_voids(bench: Workbench) -> None:
    await with_lost_segments(bench)
    bench.log.append(*batches(100, 300))
    built = build_segment(bench.folder / "attempt", batches(120, 150), 120)
    await bench.metadata.add_remote_log_segment_metadata(metadata_of(built, PARTITION))
    await bench.metadata.put_cut(PARTITION, 1, 110)
    bench.log.log_start_offset, bench.log.leader_epoch = 180, 1
    for _ in range(3):
        await bench.copy_all()
        bench.now_ms += 60_000
    assert bench.state.gaps(PARTITION) == [LogGap(90, 180)]


@pytest.mark.parametrize("is_back", [True, False])
async def test_no_gap_hides_void_copies_whose_history_the_leader_has_again(bench: Workbench, is_back: bool) -> None:
    """A former leader is back, and the one for which the tier was cut is gone. Or that one has removed its records."""
    bench.log.append(*batches(0, 90))
    await copy_to_the_end(bench)
    await bench.check_facts()
    await bench.metadata.put_cut(PARTITION, 1, 30)
    bench.log.append(*batches(90, 200, leader_epoch=0 if is_back else 1))
    bench.log.log_start_offset, bench.log.leader_epoch = 120, 2
    await copy_start(bench)
    bench.now_ms += GAP_ALARM_MS
    await copy_start(bench)
    assert "has the history of the void copies again" in str(bench.gap_task.doubt) or not is_back
    assert (bench.gap_task.doubt is None, bench.state.gaps(PARTITION)) == (
        (False, []) if is_back else (True, [LogGap(30, 120)])
    )
    await bench.accept()
    bench.restart()
    await copy_start(bench)
    assert (bench.gap_task.doubt, bench.state.gaps(PARTITION)) == (None, [LogGap(30, 120)])


async def test_a_doubt_stays_while_the_store_cannot_be_listed(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.check_facts()
    await copied(bench)
    lost = bench.segments[1]
    del bench.metadata.segments[lost.segment_id]
    bench.log.log_start_offset = 90
    await copy_start(bench)
    assert isinstance(bench.gap_task.doubt, MetadataLostError)

    def refused(prefix: str) -> AsyncIterator[StoredObject]:
        raise RetriableRemoteStorageError("503")

    monkeypatch.setattr(bench.store, "list_objects", refused)
    for _ in range(5):
        bench.now_ms += 60_000
        await copy_start(bench)
        assert isinstance(bench.gap_task.doubt, MetadataLostError)
