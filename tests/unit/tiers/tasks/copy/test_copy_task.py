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

from tests.support.tiers.attempts import batches
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench
from tiers.errors import (
    BrokerError,
    CorruptSegmentError,
    RetriableRemoteStorageError,
)
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.segment_builder import SegmentBuilder
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.tasks.copy import segment_copy
from tiers.tasks.copy.spool import Spool, SpoolError

COPY_STEPS = [
    "segment-built",
    "segment-kept",
    "copy-started-written",
    "objects-written",
    "copy-verified",
    "copy-finished-written",
]


async def test_records_that_are_not_due_are_looked_at_once(bench: Workbench) -> None:
    bench.log.append(*batches(0, 20))
    for _ in range(3):
        await bench.copy()
    assert bench.log.reads == [0]
    bench.log.append(*batches(20, 40))
    await bench.copy()
    assert (bench.log.reads, bench.finished) == ([0, 0, 10, 20, 30, 30], [(0, 29)])


async def test_the_first_copy_begins_where_the_local_log_starts(bench: Workbench) -> None:
    bench.log.append(*batches(0, 100))
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

    log.append(*batches(0, 100))
    policy = replace(POLICY, segment_bytes=2_500)
    monkeypatch.setattr(log, "read", removing)
    await bench.copy(policy)
    assert bench.finished == [(0, 29 if answer == "all records" else 19)]
    assert bench.spooled() == []


@pytest.mark.parametrize("step", COPY_STEPS)
async def test_a_process_that_ends_after_any_step_loses_nothing(bench: Workbench, step: str) -> None:
    bench.log.append(*batches(0, 100))
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

    bench.log.append(*batches(0, 30))
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
    bench.log.append(*batches(0, 40))
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
    bench.log.append(*batches(0, 50))
    await bench.copy_all()
    assert bench.finished == [(0, 9), (10, 39)]
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 39)


async def test_a_disk_with_little_room_gets_small_segments(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.log.append(*batches(0, 60))
    free_bytes = 3 * len(bench.log.bytes_of(0, 19))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_bytes))
    await bench.copy_all()
    assert bench.finished == [(0, 19), (20, 39)]


async def test_a_full_spool_ends_no_copy_that_cannot_wait(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.log.append(*batches(0, 40))
    monkeypatch.setattr(Spool, "is_full", True)
    with pytest.raises(SpoolError):
        await bench.copy()
    assert bench.finished == []
    await bench.copy_task.run(POLICY, await bench.survey(), 0, retention_share=0.4)
    assert [each.metadata.start_offset for each in bench.services.spool.kept_in(PARTITION)] == [0, 30]


async def test_a_kept_segment_counts_once_as_copy_lag(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise RetriableRemoteStorageError("down")

    bench.log.append(*batches(0, 40))
    monkeypatch.setattr(bench.store, "copy_log_segment_data", fails)
    with pytest.raises(RetriableRemoteStorageError):
        await bench.copy()
    bench.copy_task.start_over()
    bench.copy_task.observe(POLICY, await bench.survey())
    lag = bench.metric("remote_copy_lag_bytes", topic="orders", partition="0")
    assert lag == len(bench.log.bytes_of(0, 39))
