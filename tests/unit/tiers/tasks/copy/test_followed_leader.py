"""Elections during a copy: only the records of the compared leader count, and the last copy of records is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import LogDivergedError, RetriableRemoteStorageError
from tiers.metadata.tenure import Tenure
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.partition_tasks import PartitionTasks, Surveyed


def produce(bench: Workbench, count: int) -> None:
    for _ in range(count):
        bench.log.append(batch_of(bench.log.end_offset, 10, value_bytes=15, leader_epoch=bench.log.leader_epoch))


async def round_of_all(bench: Workbench, tasks: PartitionTasks, rounds: int = 1) -> None:
    """Lets so many rounds' time pass, and runs a round and its copy, as the manager does."""
    bench.now_ms += rounds * bench.services.settings.remote_log.task_interval_ms
    launched: list[tuple[Surveyed, int | None]] = []
    await tasks.round(lambda surveyed, start: launched.append((surveyed, start)))
    for surveyed, start in launched:
        try:
            await tasks.run_copy(surveyed, start)
        except LogDivergedError as error:
            tasks.stop(error, "copy")


async def owner(bench: Workbench) -> PartitionTasks:
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


def gaps(bench: Workbench) -> list[tuple[int, int]]:
    return [(gap.first_offset, gap.next_offset) for gap in bench.state.gaps(PARTITION)]


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
    tasks = await owner(bench)

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
    tasks = await owner(bench)

    def elect() -> None:
        bench.log.elect_unclean(70)
        bench.log.log_start_offset = 70
        produce(bench, 5)

    produce(bench, 3)
    before_read(bench, monkeypatch, 80, elect)
    await round_of_all(bench, tasks)
    assert bench.finished == [(0, 29), (30, 59)], "the leader is asked before the copy counts"
    assert await copied_behind_60(bench, tasks) == [(60, 69, 0), (70, 99, 1), (100, 119, 1)]
    assert gaps(bench) == []


async def test_a_survey_compares_a_kept_segment_before_the_next_copy(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is down, and half of the retention is used, so copying goes on behind a kept segment."""
    tasks, log = await owner(bench), bench.log
    monkeypatch.setattr(type(tasks.watch), "retention_share", 0.5)
    with monkeypatch.context() as failing:

        async def refuse(*_: object) -> None:
            raise RetriableRemoteStorageError("503")

        failing.setattr(bench.store, "copy_log_segment_data", refuse)
        await round_of_all(bench, tasks)
        log.elect_unclean(70)
        log.log_start_offset = 70
        produce(bench, 3)
        for _ in range(3):
            await round_of_all(bench, tasks, 20)
    assert await copied_behind_60(bench, tasks) == [(60, 69, 0), (70, 99, 1)]
    assert gaps(bench) == []
