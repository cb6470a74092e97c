from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench
from tiers.errors import (
    BrokerError,
    CorruptSegmentError,
    LogDivergedError,
    OwnershipLostError,
    RetriableRemoteStorageError,
)
from tiers.metadata.tenure import Tenure
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LogRead
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.segment_builder import BuiltSegment, SegmentBuilder
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.tasks.copy import segment_copy
from tiers.tasks.copy.spool import Spool, SpoolError
from tiers.tasks.partition_tasks import PartitionTasks

COPY_STEPS = [
    "segment-built",
    "segment-kept",
    "copy-started-written",
    "objects-written",
    "copy-verified",
    "copy-finished-written",
]


def batches(first: int, count: int, leader_epoch: int = 0) -> list[bytes]:
    """Batches of ten records and about 300 bytes: three fill a segment of the test policy."""
    return [batch_of(first + 10 * n, 10, value_bytes=15, leader_epoch=leader_epoch) for n in range(count)]


async def test_the_log_is_cut_into_segments_and_copied_byte_for_byte(bench: Workbench) -> None:
    bench.log.append(*batches(0, 10))
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 89)
    assert bench.spooled() == []


async def test_the_newest_data_stays_local_until_it_fills_a_segment_or_is_old(bench: Workbench) -> None:
    bench.log.append(*batches(0, 2))
    assert await bench.copy() is False
    assert bench.finished == []
    bench.now_ms += POLICY.segment_ms
    assert await bench.copy() is False
    assert bench.finished == [(0, 19)]
    assert bench.spooled() == []


async def test_records_that_are_not_due_are_looked_at_once(bench: Workbench) -> None:
    bench.log.append(*batches(0, 2))
    for _ in range(3):
        await bench.copy()
    assert bench.log.reads == [0]
    bench.log.append(*batches(20, 2))
    await bench.copy()
    assert (bench.log.reads, bench.finished) == ([0, 0, 10, 20, 30, 30], [(0, 29)])


async def test_nothing_at_or_above_the_last_stable_offset_is_copied(bench: Workbench) -> None:
    bench.log.append(*batches(0, 10))
    bench.log.last_stable_offset = 40
    await bench.copy_all(replace(POLICY, segment_ms=0))
    assert bench.finished[-1][1] == 39


async def test_the_first_copy_begins_where_the_local_log_starts(bench: Workbench) -> None:
    bench.log.append(*batches(0, 10))
    bench.log.log_start_offset = 20
    await bench.copy_all()
    assert bench.state.log_starts(PARTITION) == []
    assert bench.state.log_start_offset(PARTITION) == 20
    assert bench.finished[0][0] == 20
    assert bench.state.gaps(PARTITION) == []


@pytest.mark.parametrize(
    "answer", ["the next records are gone", "another leader", "the last stable offset", "no answer", "all records"]
)
async def test_records_that_the_broker_removes_meanwhile_are_copied(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """The broker removes 0 to 9 after they were read, so the owner has the last copy."""
    read, log = bench.log.read, bench.log

    async def removing(partition: TopicIdPartition, offset: int, *args: int) -> LogRead:
        if offset == 20:
            log.log_start_offset = 30 if answer == "the next records are gone" else 10
            log.leader_epoch += answer == "another leader"
            log.last_stable_offset = 20 if answer == "the last stable offset" else None
            if answer == "no answer":
                raise BrokerError("the connection was reset", retriable=True)
        return await read(partition, offset, *args)

    log.append(*batches(0, 10))
    policy = replace(POLICY, segment_bytes=2_500)
    monkeypatch.setattr(log, "read", removing)
    await bench.copy(policy)
    assert bench.finished == [(0, 29 if answer == "all records" else 19)]
    assert bench.spooled() == []


async def test_a_copy_is_announced_before_its_objects_and_finished_last(bench: Workbench) -> None:
    bench.log.append(*batches(0, 4))
    await bench.copy()
    assert bench.steps == COPY_STEPS


@pytest.mark.parametrize("step", COPY_STEPS)
async def test_a_process_that_ends_after_any_step_loses_nothing(bench: Workbench, step: str) -> None:
    bench.log.append(*batches(0, 10))
    bench.end_after = step
    with pytest.raises(ProcessEnded):
        await bench.copy_all()
    begun = {one.segment_id for one in bench.segments}
    bench.end_after = ""
    bench.restart()
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 89)
    assert begun <= {one.segment_id for one in bench.segments}
    assert len(await bench.objects()) == 2 * len(bench.segments) == 6


@pytest.fixture
async def kept(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    """The spool has [40, 70): the store failed while the broker removed the records below 60."""

    async def fails(*_: object) -> None:
        bench.log.log_start_offset = 60
        raise RetriableRemoteStorageError("down")

    bench.log.append(*batches(0, 12))
    await bench.check_facts()
    await bench.copy_task.run(replace(POLICY, segment_bytes=1), await bench.survey(), 0)
    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "copy_log_segment_data", fails)
        with pytest.raises(RetriableRemoteStorageError):
            await bench.copy()
    return bench


async def test_a_kept_segment_counts_up_to_where_a_new_leader_cut_it(kept: Workbench) -> None:
    """When that leader has removed its own records at these offsets, it would confirm the kept ones."""
    bench, tasks = kept, PartitionTasks(kept.services, PARTITION, POLICY, Tenure(0, 0))
    tasks.copy = bench.copy_task
    bench.log.elect_unclean(60)
    bench.log.append(*batches(60, 7, leader_epoch=1))
    await tasks.survey()
    bench.log.log_start_offset = 90
    for _ in range(2):
        await bench.copy_all()
        bench.now_ms += bench.services.settings.gap_alarm_ms
    await bench.copy_all()
    assert bench.state.gaps(PARTITION) == [LogGap(60, 90)]
    assert bench.services.spool.kept() == []
    assert bench.finished[4:] == [(40, 69), (90, 119)]
    assert bench.segments[4].valid_end_offset == 59


async def test_a_kept_segment_outlives_a_new_leader_that_has_it(kept: Workbench) -> None:
    bench, tasks = kept, PartitionTasks(kept.services, PARTITION, POLICY, Tenure(0, 0))
    tasks.copy = bench.copy_task
    bench.log.leader_epoch = 1
    await tasks.survey()
    bench.now_ms += bench.services.settings.remote_log.task_interval_ms
    await bench.copy_all()
    assert bench.finished[4:] == [(40, 69), (70, 99)]
    assert bench.state.gaps(PARTITION) == []
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 99)


async def test_a_copy_that_reads_back_differently_is_never_finished(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = bench.store.fetch_log_segment

    async def corrupt(*args: object) -> memoryview:
        data = bytearray(await fetch(*args))  # type: ignore[arg-type]  # handed through
        data[-1] ^= 1
        return memoryview(data)

    bench.log.append(*batches(0, 4))
    monkeypatch.setattr(bench.store, "fetch_log_segment", corrupt)
    with pytest.raises(CorruptSegmentError):
        await bench.copy()
    assert bench.finished == []


async def test_a_store_that_damages_each_copy_gets_the_next_one_later_and_later(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damaged objects are deleted."""
    copy, copied_ms = bench.store.copy_log_segment_data, []

    async def damaging(segment: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        copied_ms.append(bench.now_ms)
        custom_metadata = await copy(segment, data)
        path = next((bench.folder / "remote").rglob(f"*{segment.segment_id.id}.indexes"))
        path.write_bytes(path.read_bytes()[:-10])
        return custom_metadata

    bench.log.append(*batches(0, 3))
    await bench.check_facts()
    monkeypatch.setattr(bench.store, "copy_log_segment_data", damaging)
    for _ in range(120):
        with suppress(CorruptSegmentError, RetriableRemoteStorageError):
            await bench.copy()
        bench.now_ms += 30_000
    pauses_ms = [after - before for before, after in pairwise(copied_ms)]
    assert pauses_ms == sorted(pauses_ms)
    assert pauses_ms[1] <= 120_000
    assert pauses_ms[-1] > 4 * pauses_ms[0]
    assert len(bench.segments) == len(bench.services.spool.kept()) == 1


@pytest.mark.parametrize("step", ["made", "appended"])
async def test_a_copy_that_is_cancelled_while_a_file_is_written_leaves_nothing(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Slow(SegmentBuilder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if step == "made":
                reached.set()
                go_on.wait(60)

        def append(self, *args: Any) -> None:
            super().append(*args)
            reached.set()
            go_on.wait(60)

    monkeypatch.setattr(segment_copy, "SegmentBuilder", Slow)
    bench.log.append(*batches(0, 4))
    copying = asyncio.create_task(bench.copy())
    await asyncio.to_thread(reached.wait, 20)
    copying.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert bench.spooled() == []


async def test_a_full_disk_ends_the_read_early_and_loses_nothing(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, full = SegmentBuilder.append, [True]

    def fails_once(builder: SegmentBuilder, *args: Any) -> None:
        if builder.size_bytes and full:
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        append(builder, *args)

    monkeypatch.setattr(SegmentBuilder, "append", fails_once)
    bench.log.append(*batches(0, 5))
    await bench.copy_all()
    assert bench.finished == [(0, 9), (10, 39)]
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 39)


async def test_a_disk_with_little_room_gets_small_segments(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.log.append(*batches(0, 6))
    free_bytes = 3 * len(bench.log.bytes_of(0, 19))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_bytes))
    await bench.copy_all()
    assert bench.finished == [(0, 19), (20, 39)]


async def test_a_copy_that_is_cancelled_while_its_file_is_finished_goes_on_later(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on, finish = threading.Event(), threading.Event(), SegmentBuilder.finish

    def slow(builder: SegmentBuilder) -> BuiltSegment:
        reached.set()
        go_on.wait(60)
        return finish(builder)

    monkeypatch.setattr(SegmentBuilder, "finish", slow)
    bench.log.append(*batches(0, 10))
    copying = asyncio.create_task(bench.copy())
    await asyncio.to_thread(reached.wait, 20)
    copying.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]


@pytest.mark.parametrize("answer", [EpochEndOffset(0, 0), EpochEndOffset(-1, -1)])
async def test_a_log_that_does_not_continue_the_copy_stops_it(bench: Workbench, answer: EpochEndOffset) -> None:
    bench.log.append(*batches(0, 4))
    await bench.copy_all()
    objects = await bench.objects()
    bench.log.epoch_answer = answer
    bench.log.append(*batches(40, 10))
    with pytest.raises(LogDivergedError):
        await bench.copy()
    assert bench.finished == [(0, 29)]
    assert set(objects) <= set(await bench.objects())


async def test_nothing_is_read_or_written_for_another_owner(bench: Workbench) -> None:
    bench.log.append(*batches(0, 4))
    bench.metadata.owned = False
    with pytest.raises(OwnershipLostError):
        await bench.copy()
    assert bench.segments == []
    assert bench.log.reads == []


async def test_a_full_spool_ends_no_copy_that_cannot_wait(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.log.append(*batches(0, 4))
    monkeypatch.setattr(Spool, "is_full", True)
    with pytest.raises(SpoolError):
        await bench.copy()
    assert bench.finished == []
    await bench.copy_task.run(POLICY, await bench.survey(), 0, retention_share=0.4)
    assert [each.metadata.start_offset for each in bench.services.spool.kept_in(PARTITION)] == [0, 30]


async def test_copy_lag_is_what_is_not_remote_yet(bench: Workbench) -> None:
    bench.log.append(*batches(0, 4))
    await bench.copy()
    lag = bench.metric("remote_copy_lag_bytes", topic="orders", partition="0")
    assert lag == len(bench.log.bytes_of(30, 39))
    bench.now_ms += POLICY.segment_ms
    await bench.copy()
    await bench.copy()
    assert bench.metric("remote_copy_lag_bytes", topic="orders", partition="0") == 0


async def test_a_kept_segment_counts_once_as_copy_lag(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise RetriableRemoteStorageError("down")

    bench.log.append(*batches(0, 4))
    monkeypatch.setattr(bench.store, "copy_log_segment_data", fails)
    with pytest.raises(RetriableRemoteStorageError):
        await bench.copy()
    bench.copy_task.start_over()
    bench.copy_task.observe(POLICY, await bench.survey())
    lag = bench.metric("remote_copy_lag_bytes", topic="orders", partition="0")
    assert lag == len(bench.log.bytes_of(0, 39))
