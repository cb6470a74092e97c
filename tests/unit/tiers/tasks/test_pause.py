"""What an operator paused does not happen, and nothing is lost by a pause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.attempts import whole_rounds
from tests.support.tiers.interposed import after
from tests.support.tiers.running_manager import Running
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.topic_policy import TierWork, TopicPolicy, paused_work
from tiers.metadata.metadata_log import Tenure
from tiers.model.log_start import LogGap
from tiers.tasks.partition_tasks import PartitionTasks

KEEP_NOTHING = replace(POLICY, partition_count=1, local_retention_bytes=0)
EXPIRES_ALL = replace(KEEP_NOTHING, retention_bytes=0)


def paused(policy: TopicPolicy, *work: TierWork) -> TopicPolicy:
    """The policy that is made of the settings of a topic with this pause."""
    settings = {each.key: "true" for each in work}
    return replace(policy, tier_settings=settings, paused=paused_work(settings))


async def record(bench: Workbench, *work: TierWork) -> None:
    """Records a pause of this work and of no other."""
    changes = {each.key: "true" if each in work else None for each in TierWork}
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", changes)


async def rounds(log: InMemoryLog, count: int) -> None:
    goal = log.surveys + 4 * count  # a round asks for the bounds at least twice
    await until(lambda: log.surveys >= goal)


@pytest.fixture
def running(bench: Workbench) -> Running:
    running = Running(bench, KEEP_NOTHING)
    running.topics.policies = {POLICY.topic_id: KEEP_NOTHING}
    produce(running, 0, 10)
    return running


def produce(running: Running, first: int, end: int) -> None:
    running.logs.of[PARTITION].append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(first, end)])


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_pause_holds_trims_and_expiry_as_soon_as_it_is_recorded(copied: Workbench, is_known: bool) -> None:
    """The policy may not have it yet."""
    both = TierWork.TRIMMING, TierWork.EXPIRING
    await record(copied, *both)
    policy = paused(EXPIRES_ALL, *both) if is_known else EXPIRES_ALL
    assert (await copied.trim(policy), await copied.expire(policy)) == (None, 0)
    assert (copied.log.trims, copied.state.local_log_start(PARTITION)) == ([], None)
    assert copied.state.log_starts(PARTITION) == []
    await record(copied)
    assert await copied.trim(EXPIRES_ALL) == 60
    assert await copied.expire(EXPIRES_ALL) > 0


async def test_a_pause_ends_a_deletion_that_has_begun(copied: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def pause(*_: object) -> None:
        await record(copied, TierWork.EXPIRING)

    after(monkeypatch, copied.store, "delete_log_segment_data", pause)
    assert await copied.expire(EXPIRES_ALL) == 1
    assert len(copied.finished) == 2


async def test_paused_expiry_keeps_segments_that_users_deleted(copied: Workbench) -> None:
    """They are hidden from clients already, and go after the pause."""
    await copied.record_log_start(30)
    tasks = PartitionTasks(copied.services, PARTITION, paused(POLICY, TierWork.EXPIRING), Tenure(0, 0))
    await whole_rounds(copied, tasks, 2)
    assert copied.finished[0] == (0, 29)
    tasks.policy = POLICY
    await whole_rounds(copied, tasks, 2)
    assert copied.finished[0] == (30, 59)


async def test_each_work_is_paused_alone_and_goes_on(running: Running) -> None:
    bench, log = running.bench, running.logs.of[PARTITION]

    async def change(*work: TierWork) -> None:
        await record(bench, *work)
        running.topics.policies = {POLICY.topic_id: paused(EXPIRES_ALL, *work)}

    await change(TierWork.COPYING)
    async with running.run():
        await rounds(log, 3)
        assert bench.segments == []
        await change(TierWork.TRIMMING, TierWork.EXPIRING)
        await until(lambda: len(bench.finished) == 3)
        await rounds(log, 3)
        assert (log.trims, bench.state.log_starts(PARTITION), len(bench.finished)) == ([], [], 3)
        await change(TierWork.EXPIRING)
        await until(lambda: log.trims == [60])
        assert len(bench.finished) == 3
        await change()
        await until(lambda: bench.finished == [])


@pytest.mark.parametrize("stopped", [paused(POLICY, TierWork.COPYING), replace(POLICY, copy_disable=True)])
async def test_records_that_brokers_remove_while_nothing_is_copied_are_a_gap(
    bench: Workbench, stopped: TopicPolicy
) -> None:
    """Otherwise no client gets past them, and no search by timestamp has an answer, until something is copied."""
    bench.services = replace(bench.services, settings=replace(bench.services.settings, gap_alarm_ms=1))
    running = Running(bench, POLICY)
    log = running.logs.of[PARTITION]
    produce(running, 0, 10)
    running.topics.policies = {POLICY.topic_id: replace(POLICY, partition_count=1)}
    async with running.run():
        await until(lambda: len(bench.finished) == 3)
        work = running.manager._managed[PARTITION]
        running.topics.policies = {POLICY.topic_id: replace(stopped, partition_count=1)}
        await until(lambda: not work.is_copied and "copy" not in work.running)
        produce(running, 10, 12)
        log.log_start_offset = 110
        await until(lambda: bench.state.gaps(PARTITION) == [LogGap(90, 110)])
        await rounds(log, 3)
        assert (len(bench.finished), bench.finished[-1]) == (3, (60, 89))
        running.topics.policies = {POLICY.topic_id: replace(POLICY, partition_count=1)}
        produce(running, 12, 15)
        await until(lambda: bench.finished[-1] == (110, 139))
