"""What of an executor's result counts: what continues the tier, of the log as it is by now. The rest is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import parse_pipeline_config
from pipeline.job_services import PAUSES_S
from pipeline.offload.commit import ATTEMPTS, OffloadCommitter, PartitionOffload
from pipeline.offload.task import OffloadResult, OffloadTask, Stop, StopError, Stopped, TileCopier
from tests.fakes.in_memory_log import Aborted
from tests.fakes.record_batches import batch_of, build_batch, control_batch, record
from tests.pipeline.offload.test_batch_ends import DamagedLog
from tests.tiers.manager.workbench import PARTITION, POLICY, Workbench, workbench
from tiers.errors import OwnershipLostError, RemoteLogMetadataError, RetriableRemoteStorageError
from tiers.log.log_source import AbortedTransaction, LogRead
from tiers.manager.segment_continuation import SegmentContinuation
from tiers.manager.segment_deletion import collect_leftovers, write_state
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadataUpdate
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.indexes_object import decode_indexes_object
from tiers.segment.segment_builder import SegmentBuilder
from tiers.segment.segment_encryption import KeyRing

CONFIG = parse_pipeline_config('[upstream]\nbootstrap.servers = "localhost:9092"\n')


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Workbench]:
    """A log of thirty batches of ten records."""
    async with workbench(tmp_path) as bench:
        bench.log.append(*(batch_of(10 * number, 10) for number in range(30)))
        yield bench


class Offload:
    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.committer = OffloadCommitter(bench.services, owned_again_ms=1)
        self.one: PartitionOffload = self.committer.of(PARTITION, POLICY)
        self.plan: CopyPlan | None = None

    async def announced(self, *ends: int) -> SegmentContinuation:
        continuation = await self.committer.prepare(self.one)
        self.plan = await self.committer.announce(self.one, [self.one.next_offset, *ends], 0)
        return continuation

    async def copied(self, *ends: int, attempts: int = 1) -> OffloadResult:
        """By an executor, of which nothing counts yet; the last of so many attempts that all came to their end."""
        return await self.stored(await self.announced(*ends), attempts)

    async def stored(self, continuation: SegmentContinuation, attempts: int = 1) -> OffloadResult:
        services = self.bench.services
        assert self.plan is not None
        task = OffloadTask(CONFIG, "cluster", PARTITION, self.plan, continuation, 1 << 20)
        result = OffloadResult()
        for attempt in range(attempts):
            copier = TileCopier(task, self.bench.log, self.bench.store, services.spool, KeyRing())
            copied = [await copier.copy(number, tile) for number, tile in enumerate(task.tiles(attempt))]
            result = OffloadResult(tuple(copied), attempt=attempt)
        return result

    async def commit(self, result: OffloadResult) -> None:
        assert self.plan is not None
        await self.committer.commit(self.one, self.plan, result)

    async def objects(self) -> list[str]:
        return [key for key in await self.bench.objects() if key.endswith((".log", ".indexes"))]


async def test_what_continues_the_tier_counts(bench: Workbench) -> None:
    offload = Offload(bench)
    await offload.commit(await offload.copied(100, 150))
    await offload.commit(await offload.copied(300))
    assert bench.finished == [(0, 99), (100, 149), (150, 299)]
    assert await bench.remote_bytes() == bench.log.records
    assert (offload.one.segments, offload.one.log_bytes) == (3, len(bench.log.records))


@pytest.mark.parametrize("recorded", [True, False])
async def test_records_in_neither_tier_are_a_hole_only_if_nobody_records_their_deletion(
    bench: Workbench, recorded: bool
) -> None:
    offload = Offload(bench)
    await offload.commit(await offload.copied(100))
    bench.log.log_start_offset = 120
    began_ms, hole_alarm_ms = bench.now_ms, bench.services.settings.hole_alarm_ms

    async def pause(seconds: float) -> None:
        bench.now_ms += int(seconds * 1000)
        if recorded and bench.now_ms == began_ms + hole_alarm_ms // 2:
            await bench.metadata.raise_log_start_offset(PARTITION, 120)

    offload.committer = replace(offload.committer, sleep=pause)
    await offload.commit(await offload.copied(300))
    assert bench.finished == [(0, 99), (120, 299)]
    assert bench.metadata.log_start_offset(PARTITION) == 120
    assert bench.now_ms == began_ms + (hole_alarm_ms // 2 if recorded else hole_alarm_ms)
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="hole") == (not recorded)


async def test_of_two_attempts_one_counts_and_the_other_is_deleted_by_the_name_that_the_plan_gave_it(
    bench: Workbench,
) -> None:
    offload = Offload(bench)
    result = await offload.copied(100, 150, attempts=2)
    assert len(await offload.objects()) == 8
    assert len(bench.segments) == ATTEMPTS * 2
    await offload.commit(result)
    assert bench.finished == [(0, 99), (100, 149)]
    assert [one.segment_id for one in bench.segments] == [one.segment.segment_id for one in result.copied]
    assert len(await offload.objects()) == 4
    assert bench.metadata.copy_plans(PARTITION) == []


async def test_where_tasks_may_run_twice_at_a_time_whatever_attempt_did_not_answer_is_deleted(bench: Workbench) -> None:
    offload = Offload(bench)
    offload.committer = replace(offload.committer, is_speculative=True)
    result = await offload.copied(100, attempts=2)
    first = replace(result.copied[0].segment, segment_id=offload.plan.segment_id(0, 0)) if offload.plan else None
    assert first is not None
    await offload.commit(OffloadResult((replace(result.copied[0], segment=first),), attempt=0))
    assert [one.segment_id for one in bench.segments] == [first.segment_id]
    assert len(await offload.objects()) == 2


async def test_what_a_driver_left_that_died_the_next_owner_deletes_though_it_never_heard_of_it(
    bench: Workbench,
) -> None:
    offload = Offload(bench)
    await offload.copied(100, 150, attempts=3)
    assert len(await offload.objects()) == 12
    bench.restart()
    assert await bench.copy()
    assert len(await offload.objects()) == 2 * len(bench.segments) == 2 * len(bench.finished)
    assert bench.metadata.copy_plans(PARTITION) == []


async def test_what_a_task_stores_after_another_owner_deleted_it_as_a_leftover_is_deleted_by_its_name(
    bench: Workbench,
) -> None:
    offload = Offload(bench)
    continuation = await offload.announced(100, 150)
    await collect_leftovers(bench.services, PARTITION)
    assert (bench.segments, bench.metadata.copy_plans(PARTITION)) == ([], [])
    result = await offload.stored(continuation, attempts=2)
    assert len(await offload.objects()) == 8
    await offload.commit(result)
    assert "was deleted meanwhile" in offload.one.error
    assert (bench.segments, await offload.objects()) == ([], [])


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
    assert bench.metadata.copy_plans(PARTITION) == [offload.plan]
    await collect_leftovers(bench.services, PARTITION)
    assert len(await offload.objects()) == 2
    assert bench.metadata.copy_plans(PARTITION) == []


async def no_time(seconds: float) -> None:
    await asyncio.sleep(0)


async def test_where_the_metadata_cannot_be_written_for_good_the_partition_is_over_and_nothing_is_deleted(
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
    await collect_leftovers(bench.services, PARTITION)
    assert (bench.segments, await offload.objects()) == ([], [])


async def test_what_was_committed_by_a_write_that_never_had_an_answer_stays(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    await collect_leftovers(bench.services, PARTITION)
    assert [one.segment_id for one in bench.segments] == [first]
    assert len(await offload.objects()) == 2


async def test_a_plan_ends_though_its_end_is_not_written_at_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = Offload(bench)
    result = await offload.copied(100)

    end, answers = bench.metadata.end_copy_plan, [OwnershipLostError("lost")]

    async def lost_at_first(plan: CopyPlan) -> None:
        if answers:
            raise answers.pop()
        await end(plan)

    monkeypatch.setattr(bench.metadata, "end_copy_plan", lost_at_first)
    await offload.commit(result)
    assert bench.metadata.copy_plans(PARTITION) == []
    assert len(bench.segments) == len(bench.finished) == 1


async def test_what_a_run_leaves_that_was_ended_goes_though_the_ownership_is_lost_for_a_moment(
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
    assert (bench.segments, bench.metadata.copy_plans(PARTITION), await offload.objects()) == ([], [], [])


async def refused(segment: object) -> bool:
    raise RetriableRemoteStorageError("503")


async def test_behind_a_tile_that_failed_none_counts(bench: Workbench) -> None:
    offload = Offload(bench)
    result = await offload.copied(100, 150, 200)
    failed = OffloadResult((result.copied[0], result.copied[2]), Stopped(1, Stop.FAILED, "503"))
    await offload.commit(failed)
    assert bench.finished == [(0, 99)]
    assert len(await offload.objects()) == 2
    assert [one for one in bench.segments if (one.start_offset, one.end_offset) != (0, 99)] == []


async def test_what_a_copier_copied_meanwhile_is_not_copied_twice(bench: Workbench) -> None:
    offload = Offload(bench)
    result = await offload.copied(100)
    bench.restart()
    await bench.copy_task.run(POLICY, await bench.log.bounds(PARTITION, 1000))
    copied = bench.finished
    assert copied
    await offload.commit(result)
    assert bench.finished == copied
    assert "does not continue" in offload.one.error


async def test_a_commit_that_comes_to_light_when_the_ownership_is_back_is_not_deleted(
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
        await write_state(bench.services, result.copied[0].segment, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)

    monkeypatch.setattr(bench.metadata, "ensure_fresh", lost)
    monkeypatch.setattr(bench.metadata, "owns", lambda partition: is_owned)
    offload.committer = OffloadCommitter(bench.services, sleep=owned_again)
    await offload.commit(result)
    assert bench.finished == [(0, 99)]
    assert len(await offload.objects()) == 2


@pytest.mark.parametrize("end_offset", [0, 50, 90])
async def test_what_another_leader_does_not_have_does_not_count(bench: Workbench, end_offset: int) -> None:
    offload = Offload(bench)
    result = await offload.copied(100)
    bench.log.elect_unclean(end_offset)
    bench.log.append(*(batch_of(end_offset + 10 * number, 10, leader_epoch=1) for number in range(40)))
    await offload.commit(result)
    assert bench.finished == []
    assert await offload.objects() == []
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
    assert bench.finished == []
    assert await offload.objects() == []


async def test_a_tile_read_from_two_leaders_counts_only_if_both_agree(bench: Workbench) -> None:
    """The second begins below where the first one's records were read: what is between is gone."""
    offload = Offload(bench)
    read, log = bench.log.read, bench.log

    async def reading(partition: object, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        if offset == 0:
            return await read(PARTITION, 0, log.records.index(batch_of(50, 10)), timeout_ms)
        log.elect_unclean(30)
        log.append(batch_of(30, 10, leader_epoch=1), *(batch_of(40 + 10 * n, 10, leader_epoch=1) for n in range(6)))
        return await read(PARTITION, offset, max_bytes, timeout_ms)

    log.read = reading  # type: ignore[method-assign]  # a leader that changes between two reads
    result = await offload.copied(100)
    assert [entry.epoch for entry in result.copied[0].segment.segment_leader_epochs] == [0, 1]
    log.read = read  # type: ignore[method-assign]
    await offload.commit(result)
    assert bench.finished == []
    assert await offload.objects() == []


async def test_nothing_is_stored_for_other_offsets_than_were_announced(bench: Workbench) -> None:
    offload = Offload(bench)
    with pytest.raises(Exception, match="not from 0 to 95 as planned"):
        await offload.copied(95)
    assert await offload.objects() == []


@pytest.mark.parametrize("damaged", [100, 120, 190])
async def test_up_to_a_damaged_batch_everything_is_copied(bench: Workbench, damaged: int) -> None:
    log = DamagedLog(bench.log.records)
    log.damaged_offset, bench.log = damaged, log
    offload = Offload(bench)
    with pytest.raises(StopError) as stop:
        await offload.copied(100, 200)
    assert (stop.value.stopped.why, stop.value.stopped.offset) == (Stop.POISONED, damaged)
    result = await offload.copied(100, damaged) if damaged > 100 else await offload.copied(100)
    await offload.commit(result)
    assert await bench.remote_bytes() == log.bytes_of(0, damaged - 1)


async def test_a_task_hands_on_what_a_copier_would(bench: Workbench, tmp_path: Path) -> None:
    """Open transactions, producers and epochs, over the borders of tiles and of tasks."""

    def data(offset: int, producer_id: int, epoch: int = 0) -> bytes:
        records = [record(offset + number) for number in range(5)]
        return build_batch(
            offset, records, producer_id=producer_id, producer_epoch=0, transactional=True, leader_epoch=epoch
        )

    bench.log.records = b""
    bench.log.append(data(0, 7), data(5, 8), data(10, 7), control_batch(15, commit=False, producer_id=8))
    bench.log.append(data(16, 7, 3), control_batch(21, commit=True, producer_id=7, leader_epoch=3), data(22, 9, 3))
    bench.log.append(control_batch(27, commit=True, producer_id=9, leader_epoch=3))
    bench.log.aborted = [Aborted(8, 5, 15)]
    bench.log.leader_epoch = 3
    offload = Offload(bench)
    await offload.commit(await offload.copied(5, 10, 16))
    await offload.commit(await offload.copied(22, 28))
    newest = bench.segments[-1]
    split = decode_indexes_object(await bench.store.fetch_indexes(newest), newest).indexes
    whole = SegmentBuilder(tmp_path / "whole", 0, lambda: 0)
    whole.append(bench.log.records, [AbortedTransaction(8, 5)])
    built = whole.finish()
    assert split.producer_snapshot == built.indexes.producer_snapshot
    assert split.leader_epochs == built.leader_epochs
    assert [one.txn_index_empty for one in bench.segments] == [True, False, False, True, True]
