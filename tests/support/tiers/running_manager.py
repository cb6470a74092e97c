"""A `RemoteLogManager` that runs over fake logs of two partitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.tiers.attempts import batches
from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import TopicPolicy
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds, LogRead
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.remote_log_manager import RemoteLogManager

OTHER = TopicIdPartition(PARTITION.topic_id, 1, "orders")


class Held:
    """Holds up the calls of a method until the test lets them go on."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self._call: Callable[..., Awaitable[Any]] = getattr(owner, name)
        self.firsts: list[Any] = []
        """The first argument of each call."""
        self.reached, self.go_on, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        patch.setattr(owner, name, self)

    async def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.firsts.append(arguments[0])
        self.reached.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await self._call(*arguments, **options)


class Topics:
    def __init__(self, policy: TopicPolicy) -> None:
        self.policies = {policy.topic_id: policy}
        self.refreshes = 0

    async def refresh(self, timeout_ms: int) -> None:
        self.refreshes += 1


class Logs:
    """A log for each of two partitions."""

    def __init__(self) -> None:
        self.of = {PARTITION: InMemoryLog(), OTHER: InMemoryLog()}

    async def bounds(self, partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        return await self.of[partition].bounds(partition, timeout_ms)

    async def size_bytes(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        return await self.of[partition].size_bytes(partition, timeout_ms)

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        return await self.of[partition].read(partition, offset, max_bytes, timeout_ms)

    async def end_offset_for_epoch(
        self, partition: TopicIdPartition, leader_epoch: int, timeout_ms: int
    ) -> EpochEndOffset:
        return await self.of[partition].end_offset_for_epoch(partition, leader_epoch, timeout_ms)

    async def delete_records(
        self,
        partition: TopicIdPartition,
        offset: int,
        leader_epoch: int,
        timeout_ms: int,
        check_ownership: Callable[[], None],
    ) -> int:
        return await self.of[partition].delete_records(partition, offset, leader_epoch, timeout_ms, check_ownership)


class Running:
    def __init__(self, bench: Workbench, policy: TopicPolicy) -> None:
        self.bench = bench
        self.logs = Logs()
        self.topics = Topics(replace(policy, partition_count=2))
        remote_log = RemoteLogConfig(task_interval_ms=20, task_retry_backoff_ms=1)
        remote_log = remote_log.model_copy(update={"visible_after_ms": 0})  # the file allows only more
        settings = replace(bench.services.settings, remote_log=remote_log, segments_per_run=1)
        bench.services = replace(bench.services, source=self.logs, settings=settings, clock_ms=monotonic_ms)
        bench.metadata.clock_ms = monotonic_ms
        self.manager = RemoteLogManager(bench.services, self.topics)

    def produce(self, first: int, end: int) -> None:
        """Appends records of these offsets to the logs of all partitions."""
        for log in self.logs.of.values():
            log.append(*batches(first, end))

    def remote_end(self, partition: TopicIdPartition) -> int | None:
        return self.bench.state.remote_end_offset(partition)

    def is_stopped(self, partition: TopicIdPartition) -> bool:
        active = self.bench.services.metrics.alarms.active()
        return any(each.reason is AlarmReason.CUSTOM_METADATA and each.about == str(partition) for each in active)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.manager.run())
            try:
                yield
            finally:
                self.manager.stop()
