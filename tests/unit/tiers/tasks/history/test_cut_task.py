"""Unclean elections: the tier is cut where the histories part, and stops where a broker was emptied or restored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of, build_batch, record
from tests.support.tiers.attempts import batches
from tests.support.tiers.interposed import after, refuse
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import BrokerError, LogDivergedError, OwnershipLostError, RemoteLogMetadataNotReadyError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import UNKNOWN_EPOCH, LogGap
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.segment.producer_state import decode_producer_snapshot
from tiers.tasks.history.align import Parting, check_lineage, find_parting, require_aligned

AT_ONCE = replace(POLICY, segment_ms=0)


def produce(bench: Workbench, count: int) -> None:
    for _ in range(count):
        bench.log.append(batch_of(bench.log.end_offset, 10, value_bytes=15, leader_epoch=bench.log.leader_epoch))


def answering(bench: Workbench) -> list[tuple[int, int]]:
    """Offsets (inclusive) that the segments answer for, in order."""
    found, offset = [], 0
    while (segment := bench.state.next_segment(PARTITION, offset)) is not None:
        found.append((max(offset, segment.start_offset), segment.valid_end_offset))
        offset = segment.valid_end_offset + 1
    return found


async def copied(bench: Workbench, batches: int) -> None:
    produce(bench, batches)
    await bench.copy_all(AT_ONCE)
    assert bench.state.remote_end_offset(PARTITION) == bench.log.end_offset - 1


async def test_the_end_that_another_leader_replaced_is_cut_off_and_copied_again(bench: Workbench) -> None:
    await copied(bench, 10)
    objects = await bench.objects()
    bench.log.elect_unclean(50)
    produce(bench, 3)

    await bench.copy_all(AT_ONCE)
    ends = answering(bench)
    assert ends[0][0] == 0
    assert [start for start, _ in ends[1:]] == [end + 1 for _, end in ends[:-1]]
    assert ends[-1][1] == 79
    assert 49 in [end for _, end in ends]
    assert set(objects) < set(await bench.objects())
    first_after = bench.state.remote_log_segment_metadata(PARTITION, 50)
    assert first_after is not None
    assert first_after.segment_leader_epochs == (LeaderEpochEntry(1, 50),)
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="cut") == 1


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_cut_whose_write_failed_is_told_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """The leader of the metadata partition stops, and its successor may have the record."""
    await copied(bench, 10)
    put = bench.metadata.put_cut

    async def put_without_answer(partition: TopicIdPartition, leader_epoch: int, offset: int, **options: bool) -> None:
        monkeypatch.setattr(bench.metadata, "put_cut", put)
        if is_written:
            await put(partition, leader_epoch, offset, **options)
        raise RemoteLogMetadataNotReadyError("the record may be lost")

    monkeypatch.setattr(bench.metadata, "put_cut", put_without_answer)
    bench.log.elect_unclean(50)
    bounds = await bench.log.bounds(PARTITION, 1000)
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await bench.cut_task.run(bounds)
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="cut") == 0
    ended: list[int | None] = []

    async def end_work() -> None:
        ended.append(bench.state.remote_end_offset(PARTITION))

    assert await bench.cut_task.run(bounds, end_work)
    assert ended[-1] == 49
    assert not await bench.cut_task.run(bounds, end_work)
    assert answering(bench)[-1][1] == 49
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="cut") == 1


async def test_a_cut_is_returned_again_until_a_run_succeeds(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller discards what its tasks remember only when it is told of the CUT."""
    await copied(bench, 10)
    gone = BrokerError("the leader is gone", retriable=True)

    def lose_the_leader(*_: object) -> None:
        refuse(monkeypatch, bench.log, "end_offset_for_epoch", gone)

    after(monkeypatch, bench.metadata, "put_cut", lose_the_leader)
    bench.log.elect_unclean(50)
    bounds = await bench.log.bounds(PARTITION, 1000)
    for _ in range(2):
        with pytest.raises(BrokerError, match="the leader is gone"):
            await bench.cut_task.run(bounds)
        assert answering(bench)[-1][1] == 49
    monkeypatch.undo()
    assert await bench.cut_task.run(bounds)
    assert not await bench.cut_task.run(bounds)
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="cut") == 1


async def test_a_segment_that_is_cut_hands_on_no_state_of_producers(bench: Workbench) -> None:
    """It would tell of what was cut off."""
    for first in range(0, 40, 10):
        records = [record(first, value=b"x" * 300)]
        bench.log.append(build_batch(first, records, last_offset=first + 9, producer_id=first, producer_epoch=0))
    await bench.copy_all()
    assert bench.finished == [(0, 19)]
    bench.log.elect_unclean(10)
    assert not await bench.copy()
    bench.restart()
    await copied(bench, 2)
    last = bench.state.remote_log_segment_metadata(PARTITION, 29)
    assert last is not None
    stored = decode_indexes_object(await bench.store.fetch_indexes(last), last)
    assert decode_producer_snapshot(stored.indexes.producer_snapshot) == ()


async def lead(bench: Workbench, leader_epoch: int, log_start_offset: int, *records: bytes) -> None:
    """Elects a replica with this log, and runs a round."""
    log = bench.log
    log.records, log.leader_epoch, log.log_start_offset = b"".join(records), leader_epoch, log_start_offset
    if await bench.cut_task.run(await log.bounds(PARTITION, 1000)):
        bench.copy_task.start_over()
    await bench.copy_all(AT_ONCE)
    await bench.expire(POLICY)


DELETING = [*batches(0, 60, 3), *batches(60, 150, 4)]
CUT_OFF = [*batches(0, 120, 3), *batches(120, 180, 5)]
DELETED = user_log_start(90, leader_epoch=4, last_epoch=4)
"""One leader deletes to 90, and a leader that was cut off in epoch 3 has other records there."""


@pytest.mark.parametrize("copied_to", [180, 90])
async def test_a_deletion_that_is_recorded_late_counts_for_its_leader(bench: Workbench, copied_to: int) -> None:
    """Its leader's log begins at the log start by then. So this leader confirms the other one's records below."""
    await lead(bench, 4, 0, *DELETING)
    bench.log.last_stable_offset = copied_to
    await lead(bench, 5, 0, *CUT_OFF)
    assert (answering(bench)[0][0], answering(bench)[-1][1]) == (0, copied_to - 1)
    bench.log.last_stable_offset = None
    await bench.metadata.put_log_start(PARTITION, DELETED)
    assert (bench.state.log_starts(PARTITION), await bench.log_start()) == ([], 0)

    await lead(bench, 7, 90, *DELETING)
    assert (bench.state.log_starts(PARTITION), await bench.log_start()) == ([DELETED], 90)
    below = [end for start, end in answering(bench) if start < 90]
    assert below == [88], "a CUT voids the rest"
    assert answering(bench)[-1][1] == 149


async def test_a_late_deletion_of_another_leader_deletes_nothing_below_the_log(bench: Workbench) -> None:
    """The leader that was cut off has removed its record before the log start, and that was not copied."""
    await lead(bench, 5, 0, *CUT_OFF[:8])
    await bench.metadata.put_log_start(PARTITION, DELETED)
    await lead(bench, 5, 100, *CUT_OFF)
    assert (answering(bench), bench.state.log_starts(PARTITION)) == ([(0, 29), (30, 59), (60, 79)], [])


async def test_the_records_before_a_gap_are_compared_as_well(bench: Workbench) -> None:
    """The leader has the end of the tier. Its log begins before the gap again, with another record there."""
    await lead(bench, 0, 0, *batches(0, 80, 0))
    await lead(bench, 1, 0, *batches(0, 80, 0), *batches(80, 90, 1))
    await bench.metadata.put_log_gap(PARTITION, LogGap(90, 120), 1)
    await lead(bench, 2, 120, *batches(120, 200, 2))
    assert answering(bench)[-1][1] == 199
    for log_start, parting in ((90, None), (60, Parting(80, is_proved=True))):
        bench.log.records, bench.log.log_start_offset = (
            b"".join([*batches(0, 120, 0), *batches(120, 200, 2)]),
            log_start,
        )
        bounds = await bench.log.bounds(PARTITION, 1000)
        assert await find_parting(bench.log, bench.state, PARTITION, bounds, 1000) == parting


async def test_epochs_that_the_leader_never_saw_are_walked_over(bench: Workbench) -> None:
    await copied(bench, 3)
    for epoch in (1, 2, 3):
        bench.log.leader_epoch = epoch
        await copied(bench, 2)
    bench.log.elect_unclean(30)
    bench.log.leader_epoch = 7
    produce(bench, 9)
    bounds = await bench.log.bounds(PARTITION, 1000)
    parting = await find_parting(bench.log, bench.state, PARTITION, bounds, 1000)
    assert parting == Parting(30, is_proved=True)


@pytest.mark.parametrize("answer", [EpochEndOffset(0, 0), EpochEndOffset(-1, -1), EpochEndOffset(9, 70)])
async def test_an_answer_that_leaves_nothing_stops_the_partition(bench: Workbench, answer: EpochEndOffset) -> None:
    await copied(bench, 10)
    bench.log.epoch_answer = answer
    with pytest.raises(LogDivergedError):
        await bench.copy(AT_ONCE)
    assert bench.state.cuts(PARTITION) == []
    assert bench.state.remote_end_offset(PARTITION) == 99


@pytest.mark.parametrize("last_epoch", [1, UNKNOWN_EPOCH])
@pytest.mark.parametrize("log_start", [60, 90])
async def test_a_log_start_above_the_cut_does_not_prevent_the_cut(
    bench: Workbench, log_start: int, last_epoch: int
) -> None:
    """A user deletes records of the new leader before the owner has cut the tier."""
    policy = replace(AT_ONCE, segment_bytes=1)  # a segment for each batch of 10 records
    produce(bench, 10)
    await bench.copy_all(policy)
    bench.log.elect_unclean(50)
    produce(bench, 10)
    await bench.metadata.put_log_start(PARTITION, user_log_start(log_start, leader_epoch=1, last_epoch=last_epoch))
    await bench.copy_all(policy)
    assert [cut.offset for cut in bench.state.cuts(PARTITION)] == [50]
    assert answering(bench)[-1][1] == 149
    bench.log.leader_epoch, bench.log.log_start_offset = 2, log_start
    await bench.copy_all(policy)
    await bench.expire(POLICY)
    assert answering(bench)[0][0] == log_start


async def test_until_the_owner_has_cut_nothing_else_relies_on_the_tier(bench: Workbench) -> None:
    await copied(bench, 10)
    bench.log.elect_unclean(50)
    produce(bench, 8)
    bounds = await bench.log.bounds(PARTITION, 1000)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="from offset 50 on"):
        await require_aligned(bench.log, bench.state, PARTITION, bounds, 1000)
    await check_lineage(bench.log, PARTITION, 0, 50, 1000)
    with pytest.raises(LogDivergedError):
        await check_lineage(bench.log, PARTITION, 0, 51, 1000)
    await bench.cut_task.run(bounds)
    await require_aligned(bench.log, bench.state, PARTITION, bounds, 1000)


async def test_a_leader_that_comes_during_the_cut_needs_another_round(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await copied(bench, 10)
    bench.log.elect_unclean(50)
    bounds = await bench.log.bounds(PARTITION, 1000)
    after(monkeypatch, bench.metadata, "put_cut", lambda *_: bench.log.elect_unclean(20))
    with pytest.raises(BrokerError, match="parts from the tier again"):
        await bench.cut_task.run(bounds)
    assert [each.offset for each in bench.state.cuts(PARTITION)] == [50]


async def test_a_former_owner_does_not_cut(bench: Workbench) -> None:
    await copied(bench, 10)
    bench.log.elect_unclean(50)
    bench.metadata.owned = False
    with pytest.raises(OwnershipLostError):
        await bench.copy(AT_ONCE)
