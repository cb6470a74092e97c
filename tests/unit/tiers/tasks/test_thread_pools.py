"""How many partitions are worked on at once: copies, rounds, trims and deletions have places of their own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from uuid import UUID

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.proxy.parsed_config import parse_config
from tests.support.tiers.running_manager import OTHER, Running
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


@dataclass
class SlowStore:
    """A store whose copies end when the test says so."""

    running: Running
    copying: set[TopicIdPartition] = field(default_factory=set)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        copy = self.running.bench.store.copy_log_segment_data

        async def held(*args: object) -> bytes | None:
            partition = args[0].topic_id_partition  # type: ignore[attr-defined]  # the segment's metadata
            self.copying.add(partition)
            await self.go_on.wait()
            return await copy(*args)  # type: ignore[arg-type]  # handed through

        monkeypatch.setattr(self.running.bench.store, "copy_log_segment_data", held)


@pytest.fixture
def running(bench: Workbench) -> Running:
    running = Running(bench, replace(POLICY, local_retention_bytes=0))
    running.logs.of[PAYMENTS] = InMemoryLog()
    for log in running.logs.of.values():
        log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])
    payments = replace(POLICY, topic="payments", topic_id=PAYMENTS.topic_id, copy_disable=True)
    running.topics.policies[payments.topic_id] = payments
    return running


@pytest.fixture
def store(running: Running, monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    store = SlowStore(running)
    store.hold(monkeypatch)
    return store


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


async def test_records_that_a_broker_removes_soon_wait_for_no_other_copy(running: Running, store: SlowStore) -> None:
    """All of the retention of the brokers has passed, which is not the total of the topic."""
    total = TotalRetention(minutes=90 * 1_440)
    urgent = replace(POLICY, topic="payments", topic_id=PAYMENTS.topic_id, recorded_total=total)
    urgent = replace(urgent, broker_retention=Retention(1_000, -1))
    restart(running, manager_threads=1)
    async with running.run():
        await until(lambda: len(store.copying) == 1)
        running.topics.policies[PAYMENTS.topic_id] = urgent
        await until(lambda: PAYMENTS in store.copying)
        assert len(store.copying) == 2
        store.go_on.set()


async def test_a_pool_of_one_copies_one_partition_at_a_time(running: Running, store: SlowStore) -> None:
    """A copy that hangs holds up the other copies, and no round."""
    restart(running, manager_threads=1)
    async with running.run():
        await until(lambda: len(store.copying) == 1)
        before = [log.surveys for log in running.logs.of.values()]
        await until(
            lambda: all(log.surveys > seen + 3 for log, seen in zip(running.logs.of.values(), before, strict=True))
        )
        assert len(store.copying) == 1
        store.go_on.set()
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89])


async def test_a_pool_of_one_surveys_one_partition_at_a_time(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    restart(running, manager_threads=1)
    asked, go_on = [], asyncio.Event()
    fresh = running.bench.metadata.log.ensure_fresh

    async def slowly(partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        asked.append(partition)
        await go_on.wait()
        await fresh(partition, max_age_ms, timeout_ms)

    monkeypatch.setattr(running.bench.metadata.log, "ensure_fresh", slowly)
    async with running.run():
        await until(lambda: len(asked) == 1)
        refreshes = running.topics.refreshes
        await until(lambda: running.topics.refreshes > refreshes + 3)
        assert len(asked) == 1
        go_on.set()
        await until(lambda: set(asked) >= {PARTITION, OTHER, PAYMENTS})


async def test_a_step_that_ends_hands_its_place_on_at_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the interval nor the next look at the assignment wakes the manager here."""
    monkeypatch.setattr(remote_log_manager, "_OWNERSHIP_INTERVAL_MS", 3_600_000)
    restart(running, manager_threads=1, task_interval_ms=3_600_000)
    async with running.run():
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89], 60)
