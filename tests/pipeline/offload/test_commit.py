"""A commit counts a task's result only if it continues the tier and the present log. The rest are attempts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from pipeline.job_services import PAUSES_S
from pipeline.offload.commit import OffloadCommitter
from pipeline.offload.task import OffloadResult, Stop, Stopped
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.pipeline.one_offload import Offload
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import LogDivergedError, OwnershipLostError, RemoteLogMetadataError, RetriableRemoteStorageError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.log_source import LogRead
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState


async def test_a_segment_that_continues_the_tier_counts(bench: Workbench) -> None:
    offload = Offload(bench)
    await offload.commit(await offload.copied(100, 150))
    await offload.commit(await offload.copied(300))
    assert bench.finished == [(0, 99), (100, 149), (150, 299)]
    assert await bench.remote_bytes() == bench.log.records
    assert (offload.one.segments, offload.one.log_bytes) == (3, len(bench.log.records))


async def test_a_segment_that_the_driver_does_not_find_counts_not(bench: Workbench) -> None:
    """The executor verified it in a folder of its own machine, whose file system is not mounted."""
    offload = Offload(bench)
    result = await offload.copied(100)
    await bench.store.delete_log_segment_data(result.copied[0].segment)
    await offload.commit(result)
    assert "no such object" in offload.one.error
    assert (offload.one.failures, bench.finished) == (1, [])


@pytest.mark.parametrize("recorded", [True, False])
async def test_removed_records_are_a_gap_unless_their_deletion_is_recorded(bench: Workbench, recorded: bool) -> None:
    offload = Offload(bench)
    await offload.commit(await offload.copied(100))
    bench.log.log_start_offset = 120
    began_ms, gap_alarm_ms = bench.now_ms, bench.services.settings.gap_alarm_ms

    async def pause(seconds: float) -> None:
        bench.now_ms += int(seconds * 1000)
        if recorded and bench.now_ms == began_ms + gap_alarm_ms // 2:
            await bench.metadata.put_log_start(PARTITION, user_log_start(120, 0))

    offload.committer = replace(offload.committer, sleep=pause)
    await offload.commit(await offload.copied(300))
    assert bench.finished == [(0, 99), (120, 299)]
    assert bench.state.log_start_offset(PARTITION) == (120 if recorded else 0)
    assert bench.state.gaps(PARTITION) == ([] if recorded else [LogGap(100, 120)])
    assert bench.now_ms == began_ms + (gap_alarm_ms // 2 if recorded else gap_alarm_ms)
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="gap") == (not recorded)


async def test_speculative_attempts_that_did_not_answer_are_deleted(bench: Workbench) -> None:
    offload = Offload(bench)
    offload.committer = replace(offload.committer, is_speculative=True)
    result = await offload.copied(100, attempts=2)
    first = replace(result.copied[0].segment, segment_id=offload.plan.segment_id(0, 0)) if offload.plan else None
    assert first is not None
    await offload.commit(OffloadResult((replace(result.copied[0], segment=first),), attempt=0))
    await offload.collect()
    assert [one.segment_id for one in bench.segments] == [first.segment_id]
    assert len(await offload.objects()) == 2


async def test_the_next_owner_deletes_the_leftovers_of_a_dead_driver(
    bench: Workbench,
) -> None:
    offload = Offload(bench)
    await offload.copied(100, 150, attempts=3)
    assert len(await offload.objects()) == 12
    bench.restart()
    assert await bench.copy()
    assert len(await offload.objects()) == 2 * len(bench.segments) == 2 * len(bench.finished)
    assert bench.state.copy_plans(PARTITION) == []


async def test_while_the_store_deletes_nothing_the_plan_keeps_the_names(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = Offload(bench)
    result = await offload.copied(100, attempts=2)
    with monkeypatch.context() as refusing:
        refusing.setattr(bench.store, "delete_log_segment_data", refused)
        await offload.commit(result)
    assert bench.finished == [(0, 99)]
    assert len(await offload.objects()) == 4
    [kept] = bench.state.copy_plans(PARTITION)
    assert replace(kept, writer="") == offload.plan
    await offload.collect()
    assert len(await offload.objects()) == 2
    assert bench.state.copy_plans(PARTITION) == []


async def no_time(seconds: float) -> None:
    await asyncio.sleep(0)


async def test_copies_that_could_not_be_committed_are_finished_later(
    bench: Workbench,
) -> None:
    offload = Offload(bench)
    offload.committer = replace(offload.committer, sleep=no_time)
    result = await offload.copied(100, 150)
    bench.metadata.fail_writes = RemoteLogMetadataError("TOPIC_AUTHORIZATION_FAILED")
    await offload.commit(result)
    assert offload.one.is_over
    assert "TOPIC_AUTHORIZATION_FAILED" in offload.one.error
    assert len(await offload.objects()) == 4
    bench.metadata.fail_writes = None
    await offload.collect()
    assert bench.finished == [(0, 99), (100, 149)]
    assert (len(bench.segments), bench.state.copy_plans(PARTITION)) == (2, [])


async def test_a_commit_without_an_answer_stays(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = Offload(bench)
    offload.committer = replace(offload.committer, sleep=no_time)
    result = await offload.copied(100, 150)
    update = bench.metadata.update_remote_log_segment_metadata
    first = result.copied[0].segment.segment_id

    async def lands_at_last(written: RemoteLogSegmentMetadataUpdate) -> None:
        tried.append(written.segment_id)
        if written.segment_id == first and len(tried) > len(PAUSES_S):
            await update(written)
        raise RemoteLogMetadataError("timed out")

    tried: list[RemoteLogSegmentId] = []
    monkeypatch.setattr(bench.metadata, "update_remote_log_segment_metadata", lands_at_last)
    await offload.commit(result)
    assert "timed out" in offload.one.error
    monkeypatch.undo()
    await offload.collect()
    assert [one.segment_id for one in bench.segments] == [one.segment.segment_id for one in result.copied]
    assert bench.finished == [(0, 99), (100, 149)]


async def test_an_ended_run_finishes_its_copies_after_a_lost_ownership(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = Offload(bench)
    offload.committer = replace(offload.committer, sleep=no_time)
    await offload.copied(100, 150)
    update, lost = bench.metadata.update_remote_log_segment_metadata, 0

    async def lost_at_first(written: RemoteLogSegmentMetadataUpdate) -> None:
        nonlocal lost
        lost += 1
        if lost == 1:
            raise OwnershipLostError("not confirmed a moment ago")
        await update(written)

    monkeypatch.setattr(bench.metadata, "update_remote_log_segment_metadata", lost_at_first)
    await offload.committer.abandon([offload.one])
    assert bench.finished == [(0, 99), (100, 149)]
    assert (len(bench.segments), bench.state.copy_plans(PARTITION)) == (2, [])


async def refused(segment: object) -> bool:
    raise RetriableRemoteStorageError("503")


async def test_records_that_lost_executors_left_uncopied_are_reported(bench: Workbench) -> None:
    offload = Offload(bench)
    said = "the task was started 3 times before"
    for _ in range(3):
        await offload.announced(100)
        await offload.commit(OffloadResult(stopped=Stopped(0, Stop.LOST, said), attempt=3))
    assert (offload.one.lost, offload.one.failures, offload.one.error) == (3, 3, said)
    await offload.commit(await offload.copied(100))
    assert (offload.one.failures, offload.one.error) == (0, "")


async def test_a_tile_behind_one_that_failed_counts_when_that_is_copied_again(bench: Workbench) -> None:
    offload = Offload(bench)
    result = await offload.copied(100, 150, 200)
    await bench.store.delete_log_segment_data(result.copied[1].segment)
    await offload.commit(OffloadResult((result.copied[0], result.copied[2]), Stopped(1, Stop.FAILED, "503")))
    await offload.collect()
    assert bench.finished == [(0, 99)]
    await offload.commit(await offload.copied(150))
    await offload.collect()
    assert bench.finished == [(0, 99), (100, 149), (150, 199)]
    assert bench.segments[2].segment_id == result.copied[2].segment.segment_id
    assert len(await offload.objects()) == 2 * len(bench.segments) == 6


async def test_records_that_a_copier_copied_are_not_copied_twice(bench: Workbench) -> None:
    offload = Offload(bench)
    result = await offload.copied(100)
    bench.restart()
    await bench.copy_task.run(POLICY, await bench.survey(), 0)
    copied = bench.finished
    assert copied
    await offload.commit(result)
    assert bench.finished == copied
    assert "does not continue" in offload.one.error


async def test_a_commit_that_is_seen_after_a_lost_ownership_is_not_deleted(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = Offload(bench)
    result = await offload.copied(100)
    is_owned = True

    async def lost(partition: object, max_age_ms: int, timeout_ms: int) -> None:
        nonlocal is_owned
        is_owned = False
        raise OwnershipLostError("lost")

    async def owned_again(seconds: float) -> None:
        nonlocal is_owned
        is_owned = True
        await bench.services.write_state(result.copied[0].segment, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)

    monkeypatch.setattr(bench.metadata.log, "ensure_fresh", lost)
    monkeypatch.setattr(bench.metadata.log, "owns", lambda partition: is_owned)
    offload.committer = OffloadCommitter(bench.services, sleep=owned_again)
    await offload.commit(result)
    assert bench.finished == [(0, 99)]
    assert len(await offload.objects()) == 2


async def copied_by_the_next_owner(bench: Workbench) -> None:
    bench.restart()
    with suppress(RetriableRemoteStorageError):  # copying waits until the attempts are read for the second time
        await bench.copy_all()
    bench.now_ms += bench.services.settings.remote_log.visible_after_ms
    await bench.copy_all()
    await bench.copy()


class Killed(BaseException):
    """The driver."""


@pytest.mark.parametrize("writes", range(5))
async def test_wherever_a_driver_is_killed_the_next_owner_completes_its_work(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """It dies after so many records. What it committed stays, and every object that it left has a name."""
    offload = Offload(bench)
    result = await offload.copied(100, 150)
    left = writes

    def dying(name: str) -> None:
        write = getattr(bench.metadata, name)

        async def counted(*arguments: object) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            await write(*arguments)

        monkeypatch.setattr(bench.metadata, name, counted)

    for name in ("add_remote_log_segment_metadata", "update_remote_log_segment_metadata", "end_copy_plan"):
        dying(name)
    with pytest.raises(Killed):
        await offload.commit(result)
    monkeypatch.undo()
    committed = bench.finished
    assert committed == [(0, 99), (100, 149)][: writes // 2]
    await copied_by_the_next_owner(bench)
    assert bench.finished[: len(committed)] == committed
    assert bench.log.records.startswith(await bench.remote_bytes())
    assert len(await offload.objects()) == 2 * len(bench.segments) == 2 * len(bench.finished)
    assert bench.state.copy_plans(PARTITION) == []


async def test_a_partition_ends_at_a_damaged_batch_which_is_named(bench: Workbench) -> None:
    offload = Offload(bench)
    result = await offload.copied(100, 200)
    await offload.commit(
        replace(result, copied=result.copied[:1], stopped=Stopped(1, Stop.POISONED, "CRC", offset=130))
    )
    assert offload.one.error == "offset 130: CRC"
    backlog = offload.one.backlog(None)
    assert (backlog.first_offset, backlog.next_offset, backlog.takes_all) == (100, 130, True)


async def test_whole_segments_of_an_emptied_broker_stop_the_partition(bench: Workbench) -> None:
    offload = Offload(bench)
    result = await offload.copied(100)
    objects = await offload.objects()
    bench.log.elect_unclean(0)
    bench.log.append(*(batch_of(10 * number, 10, leader_epoch=1) for number in range(5)))
    await offload.commit(result)
    await offload.collect()
    with pytest.raises(LogDivergedError, match="emptied or restored"):
        await copied_by_the_next_owner(bench)
    assert set(await offload.objects()) >= set(objects)


@pytest.mark.parametrize("end_offset", [50, 90])
async def test_segments_that_a_new_leader_does_not_confirm_do_not_count(bench: Workbench, end_offset: int) -> None:
    offload = Offload(bench)
    result = await offload.copied(100)
    bench.log.elect_unclean(end_offset)
    bench.log.append(*(batch_of(end_offset + 10 * number, 10, leader_epoch=1) for number in range(40)))
    await offload.commit(result)
    await offload.collect()
    assert bench.state.remote_end_offset(PARTITION) in (None, end_offset - 1)
    await copied_by_the_next_owner(bench)
    assert len(await offload.objects()) == 2 * len(bench.segments) == 2 * len(bench.finished)
    assert offload.one.is_over


async def test_the_log_is_looked_at_again_before_a_write_is_tried_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = Offload(bench)
    result = await offload.copied(100)

    async def failing(segment: object) -> None:
        monkeypatch.undo()
        bench.log.elect_unclean(50)
        bench.log.append(*(batch_of(50 + 10 * number, 10, leader_epoch=1) for number in range(40)))
        raise RemoteLogMetadataError("timed out")

    monkeypatch.setattr(bench.metadata, "add_remote_log_segment_metadata", failing)
    await offload.commit(result)
    await offload.collect()
    assert bench.state.remote_end_offset(PARTITION) in (None, 49)
    await copied_by_the_next_owner(bench)
    assert len(await offload.objects()) == 2 * len(bench.segments) == 2 * len(bench.finished)


async def test_a_tile_read_from_two_leaders_counts_only_if_both_agree(bench: Workbench) -> None:
    """The second begins below where the first one's records were read: what is between is gone."""
    offload = Offload(bench)
    read, log = bench.log.read, bench.log

    async def reading(partition: object, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        if offset == 0:
            return await read(PARTITION, 0, log.records.index(batch_of(50, 10)), timeout_ms)
        log.elect_unclean(30)
        log.append(*(batch_of(30 + 10 * n, 10, leader_epoch=1) for n in range(10)))
        return await read(PARTITION, offset, max_bytes, timeout_ms)

    log.read = reading  # type: ignore[method-assign]  # a leader that changes between two reads
    result = await offload.copied(100)
    assert [entry.epoch for entry in result.copied[0].segment.segment_leader_epochs] == [0, 1]
    log.read = read  # type: ignore[method-assign]
    await offload.commit(result)
    await offload.collect()
    assert bench.finished == []
    await copied_by_the_next_owner(bench)
    assert len(await offload.objects()) == 2 * len(bench.segments) == 2 * len(bench.finished)
