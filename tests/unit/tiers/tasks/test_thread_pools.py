"""How many partitions are worked on at once: copies, rounds, trims and deletions have places of their own."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.proxy.parsed_config import parse_config
from tests.support.tiers.running_manager import OTHER, Held, Running
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.total_retention import Retention, TotalRetention
from tiers.model.ids import TopicIdPartition
from tiers.tasks import remote_log_manager
from tiers.tasks.remote_log_manager import RemoteLogManager

POOL = "remote.log.manager.thread.pool.size"
COPIERS = "remote.log.manager.copier.thread.pool.size"
PAYMENTS = TopicIdPartition(UUID(int=7), 0, "payments")
"""A partition of a topic whose copying is off."""


@pytest.fixture
def running(bench: Workbench) -> Running:
    running = Running(bench, replace(POLICY, local_retention_bytes=0))
    running.logs.of[PAYMENTS] = InMemoryLog()
    running.produce(0, 100)
    payments = replace(POLICY, topic="payments", topic_id=PAYMENTS.topic_id, copy_disable=True)
    running.topics.policies[payments.topic_id] = payments
    return running


@pytest.fixture
def copies(running: Running, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch, running.bench.store, "copy_log_segment_data")


def copied(copies: Held) -> set[TopicIdPartition]:
    return {segment.topic_id_partition for segment in copies.firsts}


def restart(running: Running, **sizes: int) -> None:
    services = running.bench.services
    remote_log = services.settings.remote_log.model_copy(update=sizes)
    settings = replace(services.settings, remote_log=remote_log)
    running.manager = RemoteLogManager(replace(services, settings=settings), running.topics)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (10, 10)),
        ({POOL: 3}, (3, 3)),
        ({COPIERS: 4}, (4, 4)),
        ({POOL: 30, COPIERS: 4}, (30, 4)),
    ],
)
def test_each_key_is_the_default_of_the_other(keys: dict[str, int], expected: tuple[int, int]) -> None:
    lines = "".join(f"{key} = {value}\n" for key, value in keys.items())
    remote_log = parse_config(lines + '[upstream]\nbootstrap.servers = "a:9092"\n').remote_log
    assert (remote_log.manager_pool_size, remote_log.copier_pool_size) == expected


async def test_records_that_a_broker_removes_soon_wait_for_no_other_copy(running: Running, copies: Held) -> None:
    """All of the retention of the brokers has passed, which is not the total of the topic."""
    total = TotalRetention(minutes=90 * 1_440)
    urgent = replace(POLICY, topic="payments", topic_id=PAYMENTS.topic_id, recorded_total=total)
    urgent = replace(urgent, broker_retention=Retention(1_000, -1))
    restart(running, manager_threads=1)
    async with running.run():
        await until(lambda: len(copied(copies)) == 1)
        running.topics.policies[PAYMENTS.topic_id] = urgent
        await until(lambda: PAYMENTS in copied(copies))
        assert len(copied(copies)) == 2
        copies.go_on.set()


async def test_a_pool_of_one_copies_one_partition_at_a_time(running: Running, copies: Held) -> None:
    """A copy that hangs holds up the other copies, and no round."""
    restart(running, manager_threads=1)
    async with running.run():
        await until(lambda: len(copied(copies)) == 1)
        before = [log.surveys for log in running.logs.of.values()]
        await until(
            lambda: all(log.surveys > seen + 3 for log, seen in zip(running.logs.of.values(), before, strict=True))
        )
        assert len(copied(copies)) == 1
        copies.go_on.set()
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89])


async def test_a_pool_of_one_surveys_one_partition_at_a_time(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    restart(running, manager_threads=1)
    fresh = Held(monkeypatch, running.bench.metadata.log, "ensure_fresh")
    async with running.run():
        await until(lambda: len(fresh.firsts) == 1)
        refreshes = running.topics.refreshes
        await until(lambda: running.topics.refreshes > refreshes + 3)
        assert len(fresh.firsts) == 1
        fresh.go_on.set()
        await until(lambda: set(fresh.firsts) >= {PARTITION, OTHER, PAYMENTS})


async def test_a_step_that_ends_hands_its_place_on_at_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the interval nor the next look at the assignment wakes the manager here."""
    monkeypatch.setattr(remote_log_manager, "_OWNERSHIP_INTERVAL_MS", 3_600_000)
    restart(running, manager_threads=1, task_interval_ms=3_600_000)
    async with running.run():
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89], 60)
