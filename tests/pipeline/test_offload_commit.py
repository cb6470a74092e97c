"""What of an executor's result counts: what continues the tier, of the log as it is by now. The rest is deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from pipeline.config import parse_pipeline_config
from pipeline.offload_commit import OffloadCommitter, PartitionOffload
from pipeline.offload_task import OffloadResult, OffloadTask, Stop, StopError, Stopped, Tile, TileCopier
from tests.fakes.in_memory_log import Aborted
from tests.fakes.record_batches import batch_of, build_batch, control_batch, record
from tests.pipeline.test_batch_ends import DamagedLog
from tests.tiers.manager.workbench import PARTITION, POLICY, Workbench, workbench
from tiers.log.log_source import AbortedTransaction, LogRead
from tiers.manager.segment_continuation import SegmentContinuation
from tiers.model.ids import RemoteLogSegmentId
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
        self.tiles: tuple[Tile, ...] = ()

    async def announced(self, *ends: int) -> SegmentContinuation:
        continuation = await self.committer.prepare(self.one)
        starts = [self.one.next_offset, *ends[:-1]]
        self.tiles = tuple(
            Tile(RemoteLogSegmentId(PARTITION, uuid4()), lo, hi) for lo, hi in zip(starts, ends, strict=True)
        )
        await self.committer.announce(self.one, self.tiles, 0)
        return continuation

    async def copied(self, *ends: int) -> OffloadResult:
        """By an executor, of which nothing counts yet."""
        continuation, services = await self.announced(*ends), self.bench.services
        task = OffloadTask(CONFIG, "cluster", PARTITION, self.tiles, continuation, 1 << 20)
        copier = TileCopier(task, self.bench.log, self.bench.store, services.spool, KeyRing())
        return OffloadResult(tuple([await copier.copy(number, tile) for number, tile in enumerate(self.tiles)]))

    async def commit(self, result: OffloadResult) -> None:
        await self.committer.commit(self.one, self.tiles, result)

    async def objects(self) -> list[str]:
        return [key for key in await self.bench.objects() if key.endswith((".log", ".indexes"))]


async def test_what_continues_the_tier_counts(bench: Workbench) -> None:
    offload = Offload(bench)
    await offload.commit(await offload.copied(100, 150))
    await offload.commit(await offload.copied(300))
    assert bench.finished == [(0, 99), (100, 149), (150, 299)]
    assert await bench.remote_bytes() == bench.log.records
    assert (offload.one.segments, offload.one.log_bytes) == (3, len(bench.log.records))


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
