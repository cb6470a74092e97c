"""The results of an offload task, and the points at which it stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.offload.task import Stop, StopError
from tests.support.fakes.in_memory_log import Aborted, DamagedLog
from tests.support.fakes.record_batches import batch_of, build_batch, control_batch, record
from tests.support.pipeline.one_offload import Offload
from tests.support.tiers.workbench import Workbench
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.segment.segment_builder import SegmentBuilder


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
    await offload.collect()
    if damaged > 100:
        await offload.commit(await offload.copied(damaged))
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
    whole = SegmentBuilder(tmp_path / "whole", 0)
    whole.append(bench.log.records, [AbortedTransaction(8, 5)])
    built = whole.finish()
    assert split.producer_snapshot == built.indexes.producer_snapshot
    assert split.leader_epochs == built.leader_epochs
    assert [one.txn_index_empty for one in bench.segments] == [True, False, False, True, True]


async def test_the_driver_commits_a_segment_with_an_epoch_that_begins_in_a_hole(bench: Workbench) -> None:
    bench.log.records, bench.log.leader_epoch = b"", 5
    bench.log.append(batch_of(0, 10, leader_epoch=3), batch_of(200, 10, leader_epoch=5))
    bench.log.elections = {3: 0, 5: 150}
    offload = Offload(bench)
    await offload.commit(await offload.copied(210))
    assert bench.finished == [(0, 209)]
    assert bench.segments[0].segment_leader_epochs == (LeaderEpochEntry(3, 0), LeaderEpochEntry(5, 150))
