"""The state that a segment continues from the one before it, also after a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.in_memory_log import Aborted
from tests.support.fakes.record_batches import build_batch, control_batch, record
from tests.support.tiers.attempts import batches
from tests.support.tiers.interposed import refuse
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import RetriableRemoteStorageError
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.segment.producer_state import decode_producer_snapshot
from tiers.segment.transactions import AbortedTxn, decode_transaction_index
from tiers.tasks.copy.segment_copy import continuation_at


async def test_leader_epochs_are_carried_from_a_kept_segment_over_a_gap(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.log.append(*batches(0, 20, leader_epoch=1), *batches(20, 40, leader_epoch=4))
    refuse(monkeypatch, bench.store, "copy_log_segment_data")
    with pytest.raises(RetriableRemoteStorageError):
        await bench.copy()
    await bench.metadata.put_log_gap(PARTITION, LogGap(30, 60), 4)
    continuation = await continuation_at(bench.services, PARTITION, 60)
    assert [(one.epoch, one.start_offset) for one in continuation.carried.leader_epochs] == [(1, 0), (4, 20)]


async def test_the_state_of_producers_is_carried_over_segments_and_restarts(bench: Workbench) -> None:
    def data(offset: int, producer_id: int, *, transactional: bool = False) -> bytes:
        value = b"x" * 350
        return build_batch(
            offset,
            [record(offset, value=value)],
            producer_id=producer_id,
            producer_epoch=0,
            transactional=transactional,
        )

    async def known(segment: RemoteLogSegmentMetadata) -> list[tuple[int, int, int]]:
        indexes = decode_indexes_object(await bench.store.fetch_indexes(segment)).indexes
        return [
            (one.producer_id, one.last_offset, one.current_txn_first_offset)
            for one in decode_producer_snapshot(indexes.producer_snapshot)
        ]

    bench.log.append(data(0, 8), data(1, 9, transactional=True), data(2, 7), data(3, 7), data(4, 7))
    await bench.copy_all(replace(POLICY, segment_bytes=900))
    assert await known(bench.segments[-1]) == [(7, 3, -1), (8, 0, -1), (9, 1, 1)]
    bench.restart()
    bench.log.append(*(data(offset, 7) for offset in range(5, 9)))
    await bench.copy_all(replace(POLICY, segment_bytes=900))
    assert await known(bench.segments[-1]) == [(7, bench.segments[-1].end_offset, -1), (8, 0, -1), (9, 1, 1)]
    assert len(bench.segments) > 3


async def test_lost_indexes_of_the_newest_segment_do_not_hold_up_the_copying(bench: Workbench) -> None:
    bench.log.append(*batches(0, 30, leader_epoch=1), *batches(30, 70, leader_epoch=4))
    await bench.copy_all()
    bench.restart()
    lost = next(path for path in (bench.folder / "remote").rglob("*.indexes") if "59-" in path.name)
    lost.unlink()
    bench.log.append(*batches(70, 110, leader_epoch=7))
    await bench.copy_all()
    newest = bench.segments[-1]
    cumulative = decode_indexes_object(await bench.store.fetch_indexes(newest)).indexes.leader_epochs
    assert [(one.epoch, one.start_offset) for one in cumulative] == [(1, 0), (4, 30), (7, 70)]


@pytest.mark.parametrize("restarts", [False, True])
async def test_kafkas_transaction_index_knows_open_transactions_after_a_restart(
    bench: Workbench, restarts: bool
) -> None:
    """The last stable offset of an abort is the start of the oldest transaction that is open then."""

    def data(offset: int, producer_id: int) -> bytes:
        records = [record(offset, value=b"x" * 350)]
        return build_batch(offset, records, producer_id=producer_id, producer_epoch=0, transactional=True)

    policy = replace(POLICY, segment_bytes=900)
    bench.log.append(data(0, 8), data(1, 9), data(2, 9))
    await bench.copy_all(policy)
    assert bench.finished == [(0, 1)]
    if restarts:
        bench.restart()
    bench.log.append(control_batch(3, commit=False, producer_id=9), data(4, 8), data(5, 8))
    bench.log.aborted = [Aborted(9, 1, 3)]
    await bench.copy_all(policy)
    indexes = decode_indexes_object(await bench.store.fetch_indexes(bench.segments[1])).indexes
    assert decode_transaction_index(indexes.transaction_index) == [AbortedTxn(9, 1, 3, 0)]
    assert indexes.history_from == 0
