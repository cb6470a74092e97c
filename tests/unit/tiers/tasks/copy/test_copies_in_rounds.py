"""Copies and attempts in whole rounds, with elections, CUTs and failing stores: the last copy of records stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.attempts import batches, begun, copied, planned, whole_rounds
from tests.support.tiers.interposed import refuse
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench
from tiers.errors import LogDivergedError
from tiers.metadata.metadata_log import Tenure
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.segment_encryption import KeyRing
from tiers.tasks.partition_tasks import PartitionTasks

FINISHED = RemoteLogSegmentState.COPY_SEGMENT_FINISHED
Announce = Callable[[Workbench, int, int], Awaitable[RemoteLogSegmentMetadata]]
announced = pytest.mark.parametrize("announce", [begun, planned], ids=["by-an-owner", "by-a-job"])


@pytest.fixture
async def log(bench: Workbench) -> Workbench:
    """The leader has 0 to 99, and 0 to 29 are copied."""
    bench.log.append(*batches(0, 100))
    await copied(bench, 0, 30)
    await bench.check_facts()
    return bench


def owner(bench: Workbench) -> PartitionTasks:
    return PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))


def unread(bench: Workbench, first: int, end: int) -> list[int]:
    known = bench.state.remote_log_segment_metadata
    return [offset for offset in range(first, end) if known(PARTITION, offset) is None]


@announced
async def test_a_whole_attempt_is_readable_up_to_the_cut(log: Workbench, announce: Announce) -> None:
    """The broker has removed 30 to 39. After an unclean election, the leader has other records from 50 on."""
    await announce(log, 30, 60)
    log.log.elect_unclean(50)
    log.log.log_start_offset = 40
    log.log.append(*batches(50, 200, leader_epoch=1))
    await whole_rounds(log, owner(log), 20)
    assert (unread(log, 30, 50), log.metadata.state.gaps(PARTITION)) == ([], [])


@announced
async def test_a_leader_without_the_records_ends_no_refusal(log: Workbench, announce: Announce) -> None:
    """A leader has other records from 40 on. Copying is disabled until retention has removed them."""
    await announce(log, 30, 60)
    log.log.elect_unclean(40)
    log.log.append(*batches(40, 200, leader_epoch=1))
    tasks = PartitionTasks(log.services, PARTITION, replace(POLICY, copy_disable=True), Tenure(0, 1))
    await whole_rounds(log, tasks, 5)
    log.log.log_start_offset = 100
    await whole_rounds(log, tasks, 20)
    assert log.metadata.state.remote_log_segment_metadata(PARTITION, 50) is None


async def test_a_whole_attempt_above_a_cut_stays(log: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses to return the attempt until other copies have its offsets."""
    attempt, tasks = await begun(log, 30, 60), owner(log)
    log.log.elect_unclean(30)
    log.log.append(*batches(30, 200, leader_epoch=1))
    with monkeypatch.context() as failing:
        refuse(failing, log.store, "fetch_indexes", when=lambda segment: segment.segment_id == attempt.segment_id)
        await whole_rounds(log, tasks, 5)
    assert unread(log, 30, 60) == []
    await whole_rounds(log, tasks, 10)
    [known] = [each for each in log.segments if each.segment_id == attempt.segment_id]
    assert (known.state, known.is_cut_off) == (FINISHED, True)
    assert await log.store.fetch_indexes(attempt)


@pytest.mark.parametrize("trouble", ["the disk has damaged it", "the key is gone"])
async def test_one_kept_segment_holds_up_no_other_one(log: Workbench, trouble: str) -> None:
    """Another owner has deleted the attempt of a kept segment, and has recorded a gap. Then its process is back."""
    log.services = replace(log.services, key_ring=KeyRing({"k1": b"1" * 32, "k2": b"2" * 32}, current="k1"))
    log.restart()
    log.end_after = "copy-started-written"
    with pytest.raises(ProcessEnded):
        await log.copy()
    log.end_after = ""
    if trouble == "the key is gone":
        log.services = replace(log.services, key_ring=KeyRing({"k2": b"2" * 32}, current="k2"))
    else:
        [path] = [each for each in log.spooled() if each.suffix == ".log"]
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    log.restart()
    await log.services.spool.open()
    [attempt] = [one for one in log.segments if one.start_offset == 30]
    for state in (RemoteLogSegmentState.DELETE_SEGMENT_STARTED, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED):
        await log.services.write_state(attempt, state)
    await log.metadata.put_log_gap(PARTITION, LogGap(30, 60), 0)
    log.log.log_start_offset = 60
    await whole_rounds(log, owner(log), 5)
    assert log.finished == [(0, 29), (60, 89), (90, 99)]
    assert len(log.spooled()) == (2 if trouble == "the key is gone" else 0)


def produce(bench: Workbench, count: int) -> None:
    for _ in range(count):
        bench.log.append(batch_of(bench.log.end_offset, 10, value_bytes=15, leader_epoch=bench.log.leader_epoch))


async def round_of_all(bench: Workbench, tasks: PartitionTasks, rounds: int = 1) -> None:
    """Lets so many rounds' time pass, and runs a round and its copy, as the manager does."""
    bench.now_ms += rounds * bench.services.settings.remote_log.task_interval_ms
    surveyed = await tasks.round()
    if surveyed is not None:
        try:
            await tasks.run_copy(surveyed)
        except LogDivergedError as error:
            tasks.stop(error, "copy")


async def owner_at_60(bench: Workbench) -> PartitionTasks:
    """Copies offsets 0 to 59, and leaves 60 to 79."""
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 0))
    produce(bench, 8)
    await round_of_all(bench, tasks)
    assert bench.finished == [(0, 29), (30, 59)]
    return tasks


async def copied_behind_60(bench: Workbench, tasks: PartitionTasks) -> list[tuple[int, int, int]]:
    """Runs some rounds. Returns the first and the last offset that count, and the first record's epoch."""
    for _ in range(4):
        await round_of_all(bench, tasks, 20)

    def line(one: RemoteLogSegmentMetadata) -> tuple[int, int, int]:
        return one.start_offset, one.valid_end_offset, one.segment_leader_epochs[0].epoch

    finished = [one for one in bench.segments if (one.start_offset, one.end_offset) in bench.finished]
    return [line(one) for one in finished if one.start_offset >= 60]


def before_read(bench: Workbench, patch: pytest.MonkeyPatch, at: int, happens: Callable[[], None]) -> None:
    """Lets something happen before the first read at an offset that is more than a look at the first batch."""
    read, left = bench.log.read, [happens]

    async def reading(partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        if offset == at and max_bytes > 1 and left:
            left.pop()()
        return await read(partition, offset, max_bytes, timeout_ms)

    patch.setattr(bench.log, "read", reading)


@pytest.mark.parametrize("at", [60, 80])
async def test_an_election_ends_the_read_and_a_later_round_reads_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    tasks = await owner_at_60(bench)

    def elect() -> None:
        bench.log.elect_unclean(70)
        produce(bench, 6)

    produce(bench, 3)
    before_read(bench, monkeypatch, at, elect)
    await round_of_all(bench, tasks)
    assert (bench.finished, bench.spooled()) == ([(0, 29), (30, 59)], [])
    assert await copied_behind_60(bench, tasks) == [(60, 89, 0), (90, 119, 1), (120, 129, 1)]
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 129)


async def test_the_last_copy_ends_where_the_new_leaders_history_begins(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has removed 60 to 69. The new leader has other records from 70 on."""
    tasks = await owner_at_60(bench)

    def elect() -> None:
        bench.log.elect_unclean(70)
        bench.log.log_start_offset = 70
        produce(bench, 5)

    produce(bench, 3)
    before_read(bench, monkeypatch, 80, elect)
    await round_of_all(bench, tasks)
    assert bench.finished == [(0, 29), (30, 59)], "the leader is asked before the copy counts"
    assert await copied_behind_60(bench, tasks) == [(60, 69, 0), (70, 99, 1), (100, 119, 1)]
    assert bench.state.gaps(PARTITION) == []


async def test_a_survey_compares_a_kept_segment_before_the_next_copy(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is down, and half of the retention is used, so copying goes on behind a kept segment."""
    tasks, log = await owner_at_60(bench), bench.log

    async def half(*_: object) -> float:
        return 0.5

    monkeypatch.setattr(tasks.watch, "share_from", half)
    with monkeypatch.context() as failing:
        refuse(failing, bench.store, "copy_log_segment_data")
        await round_of_all(bench, tasks)
        log.elect_unclean(70)
        log.log_start_offset = 70
        produce(bench, 3)
        for _ in range(3):
            await round_of_all(bench, tasks, 20)
    assert await copied_behind_60(bench, tasks) == [(60, 69, 0), (70, 99, 1)]
    assert bench.state.gaps(PARTITION) == []
