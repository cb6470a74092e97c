"""Open segments that a new leader denies: none of their records is copied. The leader's records are read again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import BrokerError, LogDivergedError, RemoteLogMetadataError, RetriableRemoteStorageError
from tiers.metadata.tenure import Tenure
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds, LogRead
from tiers.model.segment_metadata import RemoteLogClampUpdate, RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.tasks.partition_tasks import PartitionTasks, Surveyed

Work = Callable[[], Awaitable[None]]


def produce(bench: Workbench, count: int) -> None:
    for _ in range(count):
        bench.log.append(batch_of(bench.log.end_offset, 10, value_bytes=15, leader_epoch=bench.log.leader_epoch))


async def round_of_all(bench: Workbench, tasks: PartitionTasks, rounds: int) -> None:
    """Lets so many rounds' time pass, and runs a round and its copy."""
    bench.now_ms += rounds * bench.services.settings.remote_log.task_interval_ms
    launched: list[tuple[Surveyed, int | None]] = []
    await tasks.round(lambda surveyed, start: launched.append((surveyed, start)))
    for surveyed, start in launched:
        await tasks.run_copy(surveyed, start)


async def open_segment(bench: Workbench) -> PartitionTasks:
    """Copies offsets 0 to 59, and reads 60 to 79 into the open segment."""
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 0))
    produce(bench, 8)
    await round_of_all(bench, tasks, 1)
    assert bench.finished == [(0, 29), (30, 59)]
    return tasks


async def denied_segment(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> PartitionTasks:
    """The leader of epoch 1 has other records from 60 on. It denies the open segment, and then fails."""
    tasks, log = await open_segment(bench), bench.log
    log.elect_unclean(60)
    produce(bench, 8)
    ask = log.end_offset_for_epoch

    async def refuse(partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        raise BrokerError("the leader does not answer", retriable=True)

    with monkeypatch.context() as failing:

        async def answer_and_fail(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
            answer = await ask(partition, leader_epoch, timeout_ms)
            if answer.end_offset == 60:
                failing.setattr(log, "bounds", refuse)
            return answer

        failing.setattr(log, "end_offset_for_epoch", answer_and_fail)
        await round_of_all(bench, tasks, 1)
    assert tasks.stages["survey"].last_error == "the leader does not answer"
    return tasks


def gaps(bench: Workbench) -> list[tuple[int, int]]:
    return [(gap.first_offset, gap.next_offset) for gap in bench.metadata.gaps(PARTITION)]


async def copied_of_the_old_log(bench: Workbench, tasks: PartitionTasks) -> list[tuple[int, int]]:
    """Runs some rounds. Returns the segments from 60 on that begin with a record of epoch 0, below offset 100."""
    for _ in range(3):
        await round_of_all(bench, tasks, 20)
    tasks.copy.discard()
    old = [one for one in bench.segments if one.segment_leader_epochs[0].epoch == 0]
    return [(one.start_offset, one.end_offset) for one in old if 60 <= one.start_offset < 100]


def answered_late(bench: Workbench, monkeypatch: pytest.MonkeyPatch, tasks: PartitionTasks, work: Work) -> None:
    """Lets `work` happen after a new leader has answered about the open segment, and before the owner knows it."""
    ask, ask_leader = bench.log.end_offset_for_epoch, tasks.copy.ask_leader

    async def answer_late(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        answer = await ask(partition, leader_epoch, timeout_ms)
        monkeypatch.setattr(bench.log, "end_offset_for_epoch", ask)
        await work()
        return answer

    async def ask_leader_late(leader_epoch: int) -> None:
        monkeypatch.setattr(tasks.copy, "ask_leader", ask_leader)
        monkeypatch.setattr(bench.log, "end_offset_for_epoch", answer_late)
        await ask_leader(leader_epoch)

    monkeypatch.setattr(tasks.copy, "ask_leader", ask_leader_late)


async def test_a_copy_may_add_records_while_a_leader_confirms(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, log = await open_segment(bench), bench.log
    bounds = await log.bounds(PARTITION, 1000)
    log.leader_epoch = 1
    produce(bench, 1)

    async def read_on() -> None:
        await tasks.copy.run(POLICY, bounds, 60)
        log.log_start_offset = 70

    answered_late(bench, monkeypatch, tasks, read_on)
    await round_of_all(bench, tasks, 0)
    assert await copied_of_the_old_log(bench, tasks) == [(60, 89)]
    assert gaps(bench) == []


@pytest.mark.parametrize(("log_start", "copied", "gap"), [(60, [(60, 89)], []), (70, [(70, 89)], [(60, 70)])])
async def test_the_records_of_a_later_leader_are_read_again(
    bench: Workbench,
    monkeypatch: pytest.MonkeyPatch,
    log_start: int,
    copied: list[tuple[int, int]],
    gap: list[tuple[int, int]],
) -> None:
    """The old log leads again, and a copy beside the round reads from it before the denial arrives."""
    tasks, log = await open_segment(bench), bench.log
    bounds, records = await log.bounds(PARTITION, 1000), log.records
    log.elect_unclean(70)

    async def lead_again() -> None:
        log.records, log.leader_epoch = records, 2
        produce(bench, 1)
        await tasks.copy.run(POLICY, bounds, 60)
        log.log_start_offset = log_start

    answered_late(bench, monkeypatch, tasks, lead_again)
    await round_of_all(bench, tasks, 0)
    assert await copied_of_the_old_log(bench, tasks) == copied
    assert gaps(bench) == gap


async def test_a_later_leader_without_the_offsets_does_not_end_a_denial(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the denial arrives, another leader of the same log has removed the offsets, and confirms every history.

    A copy beside the round reads on. The last record of the segment is then one of the new history."""
    tasks, log = await open_segment(bench), bench.log
    bounds = await log.bounds(PARTITION, 1000)
    log.elect_unclean(60)
    produce(bench, 3)

    async def remove_and_read_on() -> None:
        log.leader_epoch, log.log_start_offset = 2, 80
        assert not await tasks.copy.run(POLICY, bounds, 60)

    answered_late(bench, monkeypatch, tasks, remove_and_read_on)
    await round_of_all(bench, tasks, 0)
    assert await copied_of_the_old_log(bench, tasks) == []
    assert gaps(bench) == [(60, 80)]


@pytest.mark.parametrize("later", ["the same leader", "another leader of the same log", "a leader with the old log"])
async def test_a_denial_holds_if_its_round_fails(bench: Workbench, monkeypatch: pytest.MonkeyPatch, later: str) -> None:
    """The broker removes the offsets before the next round. Then no leader denies the records any more."""
    tasks, log = await denied_segment(bench, monkeypatch), bench.log
    if later != "the same leader":
        log.leader_epoch += 1
    if later == "a leader with the old log":
        log.records = b"".join(batch_of(offset, 10, value_bytes=15) for offset in range(0, 120, 10))
    log.log_start_offset = 100
    assert await copied_of_the_old_log(bench, tasks) == []
    assert gaps(bench)[0] == (60, 100)


async def test_a_denial_holds_if_its_round_is_cancelled(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, log = await open_segment(bench), bench.log
    log.elect_unclean(60)
    produce(bench, 8)

    async def cancelled() -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as leaving:
        leaving.setattr(tasks, "end_work", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await round_of_all(bench, tasks, 0)
    log.log_start_offset = 100
    assert await copied_of_the_old_log(bench, tasks) == []
    assert gaps(bench)[0] == (60, 100)


async def test_no_attempt_begins_after_a_denial(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The denial arrives while the copy finishes the file of the segment. Then the broker removes the offsets."""
    tasks, log, run = await open_segment(bench), bench.log, bench.services.spool.run

    async def finish_late(work: Callable[[], object]) -> object:
        finished = await run(work)
        if log.leader_epoch == 0:
            log.elect_unclean(60)
            produce(bench, 8)
            await tasks.copy.ask_leader(log.leader_epoch)
            log.log_start_offset = 100
        return finished

    log.log_start_offset = 70
    bounds = await log.bounds(PARTITION, 1000)
    with monkeypatch.context() as finishing:
        finishing.setattr(bench.services.spool, "run", finish_late)
        with pytest.raises(BrokerError, match="a leader denied the records"):
            await tasks.copy.keep_removed(bounds)
    assert await copied_of_the_old_log(bench, tasks) == []
    assert gaps(bench)[0] == (60, 100)


async def test_the_leader_is_asked_before_a_clamp_that_fails(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader lacks copied records too, but the clamp cannot be written. Then the broker removes the offsets."""
    tasks, log = await open_segment(bench), bench.log
    await tasks.write_manifest()
    log.elect_unclean(50)
    produce(bench, 8)

    async def fail(clamp: RemoteLogClampUpdate) -> None:
        raise RemoteLogMetadataError("the metadata topic does not answer")

    with monkeypatch.context() as failing:
        failing.setattr(bench.metadata, "put_remote_log_clamp", fail)
        await round_of_all(bench, tasks, 1)
    assert tasks.stages["survey"].last_error == "the metadata topic does not answer"
    log.log_start_offset = 100
    assert await copied_of_the_old_log(bench, tasks) == []
    assert gaps(bench) == [(50, 100)]


async def test_records_of_a_former_leader_are_not_appended(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read was sent before the election. The answer arrives after the new leader has confirmed the segment."""
    tasks, log = await open_segment(bench), bench.log
    log.elect_unclean(80)
    bounds, read, records = await log.bounds(PARTITION, 1000), log.read, log.records
    produce(bench, 8)
    await round_of_all(bench, tasks, 0)
    log.records, log.leader_epoch = records, 0
    produce(bench, 1)
    late = await read(PARTITION, 80, 500, 1000)
    log.records, log.leader_epoch = records, 1

    async def answer_late(partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        return late

    monkeypatch.setattr(log, "read", answer_late)
    with pytest.raises(BrokerError, match="the leader of epoch 0 was replaced before its records arrived"):
        await tasks.copy.run(POLICY, bounds, 60)


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("first", [60, 70])
async def test_a_leader_is_asked_for_records_that_are_appended_meanwhile(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, first: int, is_cancelled: bool
) -> None:
    """A round asks the new leader while the copy appends records of the former one. Then the leader removes them.

    If `first` is 60, the segment begins with these records."""
    tasks, log = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 0)), bench.log
    run, ask_leader, asking = bench.services.spool.run, tasks.copy.ask_leader, asyncio.Event()
    produce(bench, 7)
    await round_of_all(bench, tasks, 1)
    await tasks.write_manifest()
    if first == 60:
        tasks.copy.discard()
    else:
        produce(bench, 1)
    bounds = await log.bounds(PARTITION, 1000)

    async def ask(leader_epoch: int) -> None:
        asking.set()
        await ask_leader(leader_epoch)

    async def append_late(work: Callable[[], object]) -> object:
        monkeypatch.setattr(bench.services.spool, "run", run)
        log.elect_unclean(first)
        produce(bench, 8)
        rounds.append(asyncio.create_task(tasks.round(lambda surveyed, start: None)))
        await asking.wait()
        if is_cancelled:
            copying.cancel()
        return await run(work)

    rounds: list[asyncio.Task[None]] = []
    monkeypatch.setattr(tasks.copy, "ask_leader", ask)
    monkeypatch.setattr(bench.services.spool, "run", append_late)
    copying = asyncio.create_task(tasks.copy.run(POLICY, bounds, 60))
    with pytest.raises(asyncio.CancelledError) if is_cancelled else contextlib.nullcontext():
        await copying
    await rounds[0]
    log.log_start_offset = 100
    assert await copied_of_the_old_log(bench, tasks) == []
    assert gaps(bench) == [(60, 100)]


async def test_a_round_does_not_wait_for_a_disk_that_hangs(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy appends to the spool while the leader changes. A later round asks the leader."""
    bench.services = replace(bench.services, settings=replace(bench.services.settings, request_timeout_ms=50))
    tasks, log, run = await open_segment(bench), bench.log, bench.services.spool.run
    appending, works = asyncio.Event(), asyncio.Event()
    produce(bench, 1)
    bounds = await log.bounds(PARTITION, 1000)

    async def hang(work: Callable[[], object]) -> object:
        appending.set()
        await works.wait()
        return await run(work)

    monkeypatch.setattr(bench.services.spool, "run", hang)
    copying = asyncio.create_task(tasks.copy.run(POLICY, bounds, 60))
    await appending.wait()
    log.elect_unclean(70)
    produce(bench, 8)
    launched: list[Surveyed] = []
    await tasks.round(lambda surveyed, start: launched.append(surveyed))
    assert len(launched) == 1
    works.set()
    await copying
    await tasks.round(lambda surveyed, start: None)
    log.log_start_offset = 100
    assert await copied_of_the_old_log(bench, tasks) == []
    assert gaps(bench) == [(60, 100)]


async def test_records_of_an_earlier_epoch_end_the_open_segment(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old log leads again. Its records arrive, and then it removes all offsets before it is asked for an epoch."""
    tasks, log = await open_segment(bench), bench.log
    tasks.copy.start_over()
    log.elect_unclean(60)
    produce(bench, 2)
    await round_of_all(bench, tasks, 1)
    bounds, read = await log.bounds(PARTITION, 1000), log.read
    log.records = b"".join(batch_of(offset, 10, value_bytes=15) for offset in range(0, 120, 10))
    log.leader_epoch = 2

    async def read_and_remove(partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        answer = await read(partition, offset, max_bytes, timeout_ms)
        log.log_start_offset = 120
        return answer

    with monkeypatch.context() as removing:
        removing.setattr(log, "read", read_and_remove)
        with pytest.raises(LogDivergedError, match="leader epoch 0 at offset 80 after 1"):
            await tasks.copy.run(POLICY, bounds, 60)
    assert await copied_of_the_old_log(bench, tasks) == []
    assert [one.start_offset for one in bench.segments if one.start_offset == 60] == []


async def test_an_emptied_broker_denies_nothing(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It started without its disk, and comes back with it before the owner has recorded the divergence."""
    tasks, log = await open_segment(bench), bench.log
    await tasks.write_manifest()
    log.log_start_offset = 70

    async def fail(segment: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        raise RetriableRemoteStorageError("the store does not answer")

    with monkeypatch.context() as failing:
        failing.setattr(bench.store, "copy_log_segment_data", fail)
        await round_of_all(bench, tasks, 1)
    assert "the store does not answer" in tasks.stages["copy"].last_error
    records, log.records, log.log_start_offset, log.leader_epoch = log.records, b"", 0, 1
    bounds = await log.bounds(PARTITION, 1000)
    await tasks.copy.ask_leader(bounds.leader_epoch)
    assert not tasks.copy.is_denied
    log.records, log.log_start_offset, log.leader_epoch = records, 70, 2
    assert await copied_of_the_old_log(bench, tasks) == [(60, 79)]
    assert gaps(bench) == []


async def test_a_log_start_above_the_cut_does_not_end_a_denial(bench: Workbench) -> None:
    """A user deletes records of the new leader, above the copied ones. The broker then restarts and forgets that."""
    tasks, log = await open_segment(bench), bench.log
    await tasks.write_manifest()
    log.log_start_offset = 70
    log.elect_unclean(70)
    produce(bench, 8)
    await bench.metadata.put_log_start(PARTITION, user_log_start(75, leader_epoch=1))
    log.leader_epoch = 2
    await round_of_all(bench, tasks, 0)
    log.log_start_offset = 90
    assert await copied_of_the_old_log(bench, tasks) == []
