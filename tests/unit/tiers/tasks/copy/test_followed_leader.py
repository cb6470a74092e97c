"""Open segments when the leader changes: the spool keeps what the broker has removed, the rest is read again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import RetriableRemoteStorageError
from tiers.metadata.tenure import Tenure
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.partition_tasks import PartitionTasks, Surveyed


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


async def copied_behind_60(bench: Workbench, tasks: PartitionTasks) -> list[tuple[int, int, int]]:
    """Runs some rounds. Returns the first and the last offset that count, and the first record's epoch."""
    for _ in range(4):
        await round_of_all(bench, tasks, 20)
    tasks.copy.discard()

    def line(one: RemoteLogSegmentMetadata) -> tuple[int, int, int]:
        return one.start_offset, one.valid_end_offset, one.segment_leader_epochs[0].epoch

    finished = [one for one in bench.segments if (one.start_offset, one.end_offset) in bench.finished]
    return [line(one) for one in finished if one.start_offset >= 60]


def gaps(bench: Workbench) -> list[tuple[int, int]]:
    return [(gap.first_offset, gap.next_offset) for gap in bench.metadata.gaps(PARTITION)]


async def test_the_open_segment_is_read_again_from_a_new_leader(bench: Workbench) -> None:
    """An unclean election replaced the records of the open segment."""
    tasks = await open_segment(bench)
    bench.log.elect_unclean(60)
    produce(bench, 3)
    assert await copied_behind_60(bench, tasks) == [(60, 89, 1)]
    assert gaps(bench) == []


@pytest.mark.parametrize("first", [60, 70])
async def test_the_spool_keeps_records_that_a_new_leader_does_not_have(bench: Workbench, first: int) -> None:
    """The new leader has the same log. The broker has removed the first records of the open segment, or all."""
    tasks = await open_segment(bench)
    bench.log.leader_epoch, bench.log.log_start_offset = 1, first + 10
    produce(bench, 3)
    assert await copied_behind_60(bench, tasks) == [(60, 79, 0), (80, 109, 1)]
    assert gaps(bench) == []


async def test_a_kept_segment_ends_where_the_new_leaders_history_begins(bench: Workbench) -> None:
    """The broker has removed 60 to 69. The new leader has other records from 70 on."""
    tasks = await open_segment(bench)
    bench.log.elect_unclean(70)
    bench.log.log_start_offset = 70
    produce(bench, 3)
    assert await copied_behind_60(bench, tasks) == [(60, 69, 0), (70, 99, 1)]
    assert gaps(bench) == []


async def test_records_of_another_leader_than_the_rounds_are_not_copied(bench: Workbench) -> None:
    tasks, log = await open_segment(bench), bench.log
    bounds = await log.bounds(PARTITION, 1000)
    log.elect_unclean(80)
    produce(bench, 8)
    read_bytes = tasks.copy.local_only_bytes
    assert not await tasks.copy.run(POLICY, bounds, 60)
    assert (tasks.copy.local_only_bytes, bench.finished) == (read_bytes, [(0, 29), (30, 59)])
    tasks.copy.discard()


async def test_segment_ms_goes_on_when_the_segment_is_read_again(bench: Workbench) -> None:
    """The leader changes more often than every `segment.ms`."""
    tasks, interval_ms = await open_segment(bench), bench.services.settings.remote_log.task_interval_ms
    tasks.policy = replace(POLICY, segment_ms=5 * interval_ms)
    for _ in range(4):
        bench.log.leader_epoch += 1
        await round_of_all(bench, tasks, 1)
        assert bench.finished == [(0, 29), (30, 59)]
    bench.log.leader_epoch += 1
    await round_of_all(bench, tasks, 1)
    assert bench.finished == [(0, 29), (30, 59), (60, 79)]
    tasks.copy.discard()


async def test_a_survey_compares_a_kept_segment_before_the_next_copy(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is down, and half of the retention is used, so copying goes on behind a kept segment."""
    tasks, log = await open_segment(bench), bench.log
    monkeypatch.setattr(type(tasks.watch), "is_retention_half_used", True)
    log.elect_unclean(70)
    log.log_start_offset = 70
    produce(bench, 3)
    with monkeypatch.context() as failing:

        async def refuse(*_: object) -> None:
            raise RetriableRemoteStorageError("503")

        failing.setattr(bench.store, "copy_log_segment_data", refuse)
        for _ in range(3):
            await round_of_all(bench, tasks, 20)
    assert await copied_behind_60(bench, tasks) == [(60, 69, 0), (70, 99, 1)]
    assert gaps(bench) == []
