from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench
from tiers.errors import (
    BrokerError,
    CorruptSegmentError,
    LogDivergedError,
    MetadataLostError,
    OwnershipLostError,
    RetriableRemoteStorageError,
)
from tiers.metadata.tenure import Tenure
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import decode_indexes_object, encode_indexes_object
from tiers.segment.segment_builder import SegmentBuilder
from tiers.tasks.copy import copy_task
from tiers.tasks.copy.spool import SpoolError
from tiers.tasks.partition_tasks import PartitionTasks

COPY_STEPS = ["segment-built", "copy-started-written", "objects-written", "copy-verified", "copy-finished-written"]


def batches(first: int, count: int, leader_epoch: int = 0) -> list[bytes]:
    """Batches of ten records and about 300 bytes: three fill a segment of the test policy."""
    return [batch_of(first + 10 * n, 10, value_bytes=15, leader_epoch=leader_epoch) for n in range(count)]


async def test_the_log_is_cut_into_segments_and_copied_byte_for_byte(bench: Workbench) -> None:
    bench.log.append(*batches(0, 10))
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 89)
    assert [path.suffix for path in bench.spooled()] == [".spool"]


async def test_the_newest_data_stays_local_until_it_fills_a_segment_or_is_old(bench: Workbench) -> None:
    bench.log.append(*batches(0, 2))
    assert await bench.copy() is False
    assert bench.finished == []
    bench.now_ms += POLICY.segment_ms
    assert await bench.copy() is False
    assert bench.finished == [(0, 19)]
    assert bench.spooled() == []


async def test_an_open_segment_goes_on_where_it_stood(bench: Workbench) -> None:
    bench.log.append(*batches(0, 2))
    await bench.copy()
    bench.log.reads.clear()
    bench.log.append(*batches(20, 2))
    await bench.copy()
    assert bench.log.reads[0] == 20
    assert bench.finished == [(0, 29)]


async def test_nothing_at_or_above_the_last_stable_offset_is_copied(bench: Workbench) -> None:
    bench.log.append(*batches(0, 10))
    bench.log.last_stable_offset = 40
    await bench.copy_all(replace(POLICY, segment_ms=0))
    assert bench.finished[-1][1] == 39


async def test_the_first_copy_begins_where_the_local_log_starts(bench: Workbench) -> None:
    bench.log.append(*batches(0, 10))
    bench.log.log_start_offset = 20
    await bench.copy_all()
    assert bench.metadata.log_starts(PARTITION) == []
    assert bench.metadata.log_start_offset(PARTITION) == 20
    assert bench.finished[0][0] == 20
    assert bench.metadata.gaps(PARTITION) == []


async def test_records_that_are_deleted_while_they_are_read_leave_what_was_read(bench: Workbench) -> None:
    bench.log.append(*batches(0, 5))
    await bench.copy_all()
    bounds = await bench.log.bounds(PARTITION, 1000)
    bench.log.append(*batches(50, 10))
    bench.log.log_start_offset = 80
    assert await bench.copy_task.run(POLICY, bounds, 30) is False
    assert bench.finished == [(0, 29), (30, 49)]
    assert bench.spooled() == []


async def test_records_that_are_deleted_before_the_first_copy_are_not_copied(bench: Workbench) -> None:
    bench.log.append(*batches(0, 2))
    await bench.copy()
    bounds = await bench.log.bounds(PARTITION, 1000)
    bench.log.append(*batches(20, 10))
    bench.log.log_start_offset = 50
    assert await bench.copy_task.run(POLICY, bounds, 0) is False
    await bench.copy_all()
    assert bench.finished[0] == (50, 79)


async def test_an_open_segment_is_copied_before_the_broker_removes_more(bench: Workbench) -> None:
    bench.log.append(*batches(0, 5))
    await bench.copy_all()
    assert bench.copy_task.local_only_bytes > 0
    bench.log.append(*batches(50, 2))
    bench.log.log_start_offset = 40
    await bench.copy()
    assert bench.finished == [(0, 29), (30, 49)]
    assert bench.metadata.gaps(PARTITION) == []


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
    ids_before = {one.segment_id for one in bench.segments if one.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED}
    bench.end_after = ""
    bench.restart()
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 89)
    assert not ids_before & {one.segment_id for one in bench.segments}
    assert len(await bench.objects()) == 2 * len(bench.segments)


async def test_a_store_that_fails_leaves_the_attempt_to_be_collected(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(*_: object) -> None:
        raise RetriableRemoteStorageError("down")

    bench.log.append(*batches(0, 4))
    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "copy_log_segment_data", down)
        with pytest.raises(RetriableRemoteStorageError):
            await bench.copy()
    failed = bench.segments[0]
    assert failed.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED
    assert bench.spooled() == []
    await bench.copy()
    assert bench.finished == [(0, 29)]
    assert bench.segments[0].segment_id != failed.segment_id


@pytest.mark.parametrize("is_leader_known", [True, False])
async def test_a_failed_copy_keeps_records_that_the_broker_removed_meanwhile(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, is_leader_known: bool
) -> None:
    """The broker's retention does not wait for the store: what was read is the last copy."""
    ask = bench.log.bounds

    async def unknown(*_: object) -> None:
        monkeypatch.setattr(bench.log, "bounds", ask)
        raise BrokerError("no leader", retriable=True)

    async def fails(*_: object) -> None:
        bench.log.log_start_offset = 60
        if not is_leader_known:
            monkeypatch.setattr(bench.log, "bounds", unknown)
        raise RetriableRemoteStorageError("down")

    bench.log.append(*batches(0, 8))
    with monkeypatch.context() as patched:
        await bench.copy_task.run(replace(POLICY, segment_bytes=1), await bench.log.bounds(PARTITION, 1000), 0)
        assert bench.finished == [(0, 9), (10, 19), (20, 29), (30, 39)]
        patched.setattr(bench.store, "copy_log_segment_data", fails)
        for _ in range(2):
            with pytest.raises(RetriableRemoteStorageError):
                await bench.copy()
    assert len(bench.spooled()) == 1
    await bench.copy_all()
    assert bench.finished[4:] == [(40, 69)]
    assert bench.metadata.gaps(PARTITION) == []
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 69)


async def test_a_cancelled_copy_keeps_records_that_the_broker_removed_meanwhile(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that stops cancels its copy, and may go on later."""
    copying = asyncio.Event()

    async def hangs(*_: object) -> None:
        copying.set()
        await asyncio.Event().wait()

    bench.log.append(*batches(0, 8))
    await bench.copy_task.run(replace(POLICY, segment_bytes=1), await bench.log.bounds(PARTITION, 1000), 0)
    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "copy_log_segment_data", hangs)
        attempt = asyncio.create_task(bench.copy())
        await copying.wait()
        attempt.cancel()
        await asyncio.wait([attempt])
    bench.log.log_start_offset = 60
    await bench.copy_all()
    assert bench.finished[4:] == [(40, 69)]


async def test_a_failed_copy_that_is_cancelled_too_keeps_its_records(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition stops while the copier asks the broker whether it still has the records."""
    asking, ask = asyncio.Event(), bench.log.bounds

    async def hangs(*_: object) -> None:
        asking.set()
        await asyncio.Event().wait()

    async def fails(*_: object) -> None:
        monkeypatch.setattr(bench.log, "bounds", hangs)
        raise RetriableRemoteStorageError("down")

    bench.log.append(*batches(0, 8))
    await bench.copy_task.run(replace(POLICY, segment_bytes=1), await bench.log.bounds(PARTITION, 1000), 0)
    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "copy_log_segment_data", fails)
        attempt = asyncio.create_task(bench.copy())
        await asking.wait()
        attempt.cancel()
        await asyncio.wait([attempt])
    monkeypatch.setattr(bench.log, "bounds", ask)
    bench.log.log_start_offset = 60
    await bench.copy_all()
    assert bench.finished[4:] == [(40, 69)]


@pytest.fixture
async def kept(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    """The spool has [40, 70): the store failed while the broker removed the records below 60."""

    async def fails(*_: object) -> None:
        bench.log.log_start_offset = 60
        raise RetriableRemoteStorageError("down")

    bench.log.append(*batches(0, 12))
    await bench.write_manifest()
    await bench.copy_task.run(replace(POLICY, segment_bytes=1), await bench.log.bounds(PARTITION, 1000), 0)
    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "copy_log_segment_data", fails)
        with pytest.raises(RetriableRemoteStorageError):
            await bench.copy()
    return bench


def damage(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:100] + b"?" + content[101:])


async def test_a_kept_segment_whose_file_is_gone_stops_nothing(kept: Workbench) -> None:
    """Each attempt would fail, and records that the broker still has would never be copied."""
    bench = kept
    [file] = bench.spooled()
    file.unlink()
    with pytest.raises(SpoolError):
        await bench.copy()
    await bench.copy()
    bench.now_ms += bench.services.settings.gap_alarm_ms
    await bench.copy_all()
    assert bench.metadata.gaps(PARTITION) == [LogGap(40, 60)]
    assert bench.finished[4:] == [(60, 89)]


async def test_a_kept_segment_that_the_disk_damaged_is_dropped(kept: Workbench) -> None:
    """The attempt at it looks whole in the store, so an operator decides."""
    bench = kept
    [file] = bench.spooled()
    damage(file)
    with pytest.raises(CorruptSegmentError):
        await bench.copy()
    assert bench.spooled() == []
    with pytest.raises(MetadataLostError):
        await bench.copy()
    await bench.accept()
    await bench.check_manifest()
    await bench.copy_all()
    assert bench.finished[4:] == [(60, 89)]


async def test_a_kept_segment_that_a_new_leader_does_not_have_is_not_copied(kept: Workbench) -> None:
    """When that leader has removed its own records at these offsets, it would confirm the kept ones."""
    bench, tasks = kept, PartitionTasks(kept.services, PARTITION, POLICY, Tenure(0, 0))
    tasks.copy = bench.copy_task
    bench.log.elect_unclean(60)
    bench.log.append(*batches(60, 7, leader_epoch=1))
    await tasks.survey()
    assert bench.spooled() == []
    bench.log.log_start_offset = 90
    await bench.copy()
    bench.now_ms += bench.services.settings.gap_alarm_ms
    await bench.copy_all()
    assert bench.metadata.gaps(PARTITION) == [LogGap(40, 90)]
    assert bench.finished[4:] == [(90, 119)]


async def test_a_kept_segment_outlives_a_new_leader_that_has_it(kept: Workbench) -> None:
    bench, tasks = kept, PartitionTasks(kept.services, PARTITION, POLICY, Tenure(0, 0))
    tasks.copy = bench.copy_task
    bench.log.leader_epoch = 1
    await tasks.survey()
    await bench.copy_all()
    assert bench.finished[4:] == [(40, 69), (70, 99)]


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


async def test_read_back_indexes_that_differ_from_the_built_ones_are_refused(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = bench.store.fetch_indexes

    async def another(metadata: RemoteLogSegmentMetadata) -> bytes:
        stored = decode_indexes_object(await fetch(metadata))
        return encode_indexes_object(stored.metadata, replace(stored.indexes, leader_epochs=()))

    bench.log.append(*batches(0, 4))
    monkeypatch.setattr(bench.store, "fetch_indexes", another)
    with pytest.raises(CorruptSegmentError):
        await bench.copy()
    assert bench.finished == []


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

    monkeypatch.setattr(copy_task, "SegmentBuilder", Slow)
    bench.log.append(*batches(0, 2))
    copying = asyncio.create_task(bench.copy())
    await asyncio.to_thread(reached.wait, 20)
    copying.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    bench.copy_task.discard()
    assert bench.spooled() == []
    assert bench.services.spool.used_bytes == 0


async def test_a_spool_file_that_cannot_be_removed_is_discarded_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, failures = SegmentBuilder.discard, []

    def fail(builder: SegmentBuilder) -> None:
        remove(builder)
        failures.append(builder)
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(SegmentBuilder, "discard", fail)
    bench.log.append(*batches(0, 1))
    await bench.copy()
    with pytest.raises(OSError, match="Read-only file system"):
        bench.copy_task.discard()
    bench.copy_task.discard()
    assert len(failures) == 1
    assert bench.services.spool.used_bytes == 0


async def test_a_full_disk_costs_a_segment_its_beginning_again_and_nothing_else(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullOnce(SegmentBuilder):
        is_full = True

        def append(self, *args: Any) -> None:
            if FullOnce.is_full and self.size_bytes:
                FullOnce.is_full = False
                self._file.write(b"half of what came")
                raise OSError(errno.ENOSPC, "No space left on device")
            super().append(*args)

    monkeypatch.setattr(copy_task, "SegmentBuilder", FullOnce)
    bench.log.append(*batches(0, 4))
    with pytest.raises(SpoolError, match="No space left"):
        await bench.copy()
    assert bench.spooled() == []
    assert bench.services.spool.used_bytes == 0
    await bench.copy()
    assert bench.finished == [(0, 29)]
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 29)


@pytest.mark.parametrize("answer", [EpochEndOffset(0, 0), EpochEndOffset(0, 29), EpochEndOffset(-1, -1)])
async def test_a_log_that_does_not_continue_the_copy_stops_it(bench: Workbench, answer: EpochEndOffset) -> None:
    bench.log.append(*batches(0, 4))
    await bench.copy_all()
    objects = await bench.objects()
    bench.log.epoch_answer = answer
    bench.log.append(*batches(40, 10))
    with pytest.raises(LogDivergedError):
        await bench.copy()
    assert bench.finished == [(0, 29)]
    # The owner has also written the manifest, which remembers the divergence.
    assert set(objects) <= set(await bench.objects())


async def test_an_open_segment_that_the_leader_lost_is_not_copied(bench: Workbench) -> None:
    bench.log.append(*batches(0, 2, leader_epoch=1))
    await bench.copy()
    bench.log.records = b""
    bench.log.append(*batches(0, 1, leader_epoch=1), *batches(10, 5, leader_epoch=3))
    bench.log.leader_epoch = 3
    with pytest.raises(LogDivergedError):
        await bench.copy()
    assert bench.segments == []
    await bench.copy_all()
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 29)


async def test_nothing_is_read_or_written_for_another_owner(bench: Workbench) -> None:
    bench.log.append(*batches(0, 4))
    bench.metadata.owned = False
    with pytest.raises(OwnershipLostError):
        await bench.copy()
    assert bench.segments == []
    assert bench.log.reads == []


async def test_a_full_spool_rolls_what_it_has(bench: Workbench) -> None:
    bench.log.append(*batches(0, 1))
    bench.services.spool.grow(bench.services.settings.spool_max_bytes)
    await bench.copy()
    assert bench.finished == [(0, 9)]


async def test_copy_lag_is_what_is_not_remote_yet(bench: Workbench) -> None:
    bench.log.append(*batches(0, 4))
    await bench.copy()
    lag = bench.metric("remote_copy_lag_bytes", topic="orders", partition="0")
    assert lag == len(bench.log.bytes_of(30, 39))
    bench.now_ms += POLICY.segment_ms
    await bench.copy()
    await bench.copy()
    assert bench.metric("remote_copy_lag_bytes", topic="orders", partition="0") == 0
