"""The scheduled processing times (docs/founding.md, "RLM tasks"), on a clock that the test moves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.interposed import refuse
from tests.support.tiers.running_manager import OTHER, Running
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.settings import RemoteLogConfig
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.tasks.partition_tasks import PartitionTasks, Surveyed
from tiers.tasks.remote_log_manager import RemoteLogManager

PROCESS_INTERVAL_MS = 3_600_000
RETRY_INTERVAL_MS = 1_000_000


class Schedule:
    def __init__(self, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = Running(bench, POLICY)
        self.bench = bench
        self.rounds = dict.fromkeys((PARTITION, OTHER), 0)
        remote_log = RemoteLogConfig(
            task_interval_ms=PROCESS_INTERVAL_MS, task_retry_backoff_ms=RETRY_INTERVAL_MS
        ).model_copy(update={"visible_after_ms": 0})
        settings = replace(bench.services.settings, remote_log=remote_log, segments_per_run=10)
        bench.metadata.clock_ms = lambda: bench.now_ms
        bench.services = replace(bench.services, settings=settings, clock_ms=lambda: bench.now_ms)
        self.manager = self.running.manager = RemoteLogManager(bench.services, self.running.topics)
        survey = PartitionTasks.survey

        async def counted(tasks: PartitionTasks) -> Surveyed | None:
            self.rounds[tasks.partition] += 1
            return await survey(tasks)

        monkeypatch.setattr(PartitionTasks, "survey", counted)
        for log in self.running.logs.of.values():
            log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])

    def due_ms(self, partition: TopicIdPartition) -> int:
        return self.manager._managed[partition].stages["copy"].due_ms

    async def until_rounds(self, *counts: int) -> None:
        """Waits until the partitions had so many rounds, and all of the rounds have ended."""
        await until(lambda: tuple(self.rounds.values()) == counts and not self.manager._running_tasks())

    async def until_rounds_of(self, partition: TopicIdPartition, count: int) -> None:
        await until(lambda: self.rounds[partition] == count and not self.manager._running_tasks())

    async def pass_time(self, now_ms: int) -> None:
        """Moves the clock, and waits until the manager has looked at the schedule."""
        self.bench.now_ms = now_ms
        self.manager._wake.set()
        await until(lambda: not self.manager._wake.is_set())


@pytest.fixture
def schedule(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    return Schedule(bench, monkeypatch)


async def test_a_new_partition_is_due_at_time_0(schedule: Schedule) -> None:
    assert schedule.bench.now_ms < PROCESS_INTERVAL_MS
    list(schedule.manager._assign())
    assert [schedule.due_ms(each) for each in (PARTITION, OTHER)] == [0, 0]
    async with schedule.running.run():
        await schedule.until_rounds(1, 1)
        assert [schedule.running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89]


async def test_after_a_success_the_process_interval_passes(schedule: Schedule) -> None:
    began_ms = schedule.bench.now_ms
    async with schedule.running.run():
        await schedule.until_rounds(1, 1)
        due_ms = began_ms + PROCESS_INTERVAL_MS
        assert [schedule.due_ms(each) for each in (PARTITION, OTHER)] == [due_ms, due_ms]
        await schedule.pass_time(due_ms - 1)
        assert not schedule.manager._running_tasks()
        await schedule.pass_time(due_ms)
        await schedule.until_rounds(2, 2)
        assert schedule.due_ms(PARTITION) == due_ms + PROCESS_INTERVAL_MS


async def test_after_a_failure_of_the_store_the_retry_interval_passes(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_down = True
    refuse(
        monkeypatch,
        schedule.bench.store,
        "copy_log_segment_data",
        when=lambda segment: is_down and segment.topic_id_partition == PARTITION,
    )
    now_ms = schedule.bench.now_ms
    async with schedule.running.run():
        await schedule.until_rounds(1, 1)
        assert schedule.due_ms(OTHER) == now_ms + PROCESS_INTERVAL_MS
        pauses_ms = [RETRY_INTERVAL_MS, 2 * RETRY_INTERVAL_MS, PROCESS_INTERVAL_MS, PROCESS_INTERVAL_MS]
        for failures, pause_ms in enumerate(pauses_ms, 1):
            assert schedule.due_ms(PARTITION) == now_ms + pause_ms
            now_ms += pause_ms
            is_down = failures < len(pauses_ms)
            await schedule.pass_time(now_ms)
            # The round after the one that finishes the attempt finds where copying continues.
            await schedule.until_rounds_of(PARTITION, failures + (1 if is_down else 2))
        assert schedule.running.remote_end(PARTITION) == 89
        assert schedule.due_ms(PARTITION) == now_ms + PROCESS_INTERVAL_MS


async def test_a_partition_that_is_taken_away_goes_when_its_step_has_ended(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The founding mark "deleted": no step begins for the partition, and it comes back only when its step has ended."""
    copying, may_end = asyncio.Event(), asyncio.Event()

    copy = schedule.bench.store.copy_log_segment_data

    async def slow_to_cancel(metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        if not copying.is_set():
            copying.set()
            try:
                await asyncio.Event().wait()
            finally:
                await may_end.wait()
        return await copy(metadata, data)

    schedule.running.topics.policies = {PARTITION.topic_id: replace(POLICY, partition_count=1)}
    monkeypatch.setattr(schedule.bench.store, "copy_log_segment_data", slow_to_cancel)
    async with schedule.running.run():
        await copying.wait()
        schedule.bench.metadata.owned = False
        list(schedule.manager._assign())
        assert schedule.manager.partitions == []
        assert schedule.manager._is_worked_on(PARTITION)
        schedule.bench.metadata.owned = True
        list(schedule.manager._assign())
        assert schedule.manager.partitions == []
        assert schedule.rounds[PARTITION] == 1
        may_end.set()
        await until(lambda: schedule.running.remote_end(PARTITION) == 89)
        assert schedule.manager.partitions == [PARTITION]
