"""A copy without progress is reported, and one that moves bytes is not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest

from tests.support.tiers.attempts import batches
from tests.support.tiers.running_manager import OTHER, Running, Topics
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.broker.client import monotonic_ms
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.activity import while_active
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.tasks import remote_log_manager
from tiers.tasks.remote_log_manager import RemoteLogManager

ALARM_MS = 600_000
"""Longer than any machine stands still."""


@dataclass
class Clock:
    """Goes on as it does, and further when a test says so."""

    passed_ms: int = 0

    def __call__(self) -> int:
        return monotonic_ms() + self.passed_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def running(bench: Workbench, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setattr(remote_log_manager, "_WATCH_INTERVAL_MS", 20)
    running = Running(bench, replace(POLICY, local_retention_bytes=0))
    for log in running.logs.of.values():
        log.append(*batches(0, 100))
    settings = replace(bench.services.settings, copy_stall_alarm_ms=ALARM_MS)
    bench.services = replace(bench.services, settings=settings, clock_ms=clock)
    running.manager = RemoteLogManager(bench.services, running.topics)
    return running


def stalls(running: Running) -> float:
    return running.bench.metric("remote_log_alarms_total", topic="orders", reason="copy-stalled")


def stalled_seconds(running: Running) -> list[float]:
    metric = running.bench.metric
    return [metric("remote_copy_stalled_seconds", topic="orders", partition=each) for each in "01"]


async def test_a_copy_to_a_silent_store_is_reported(
    running: Running, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, begun = asyncio.Event(), 0
    copy = running.bench.store.copy_log_segment_data

    async def stuck(*args: object) -> bytes | None:
        nonlocal begun
        begun += 1
        await go_on.wait()
        return await copy(*args)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(running.bench.store, "copy_log_segment_data", stuck)
    caplog.set_level("INFO", "tiers.tasks.partition_watch")
    async with running.run():
        await until(lambda: begun == 2)
        clock.passed_ms = ALARM_MS
        await until(lambda: stalls(running) == 2)
        assert running.bench.active("copy-stalled") == 2
        assert min(stalled_seconds(running)) >= ALARM_MS / 1000
        lines = [vars(line) for line in caplog.records if line.getMessage() == "copying makes no progress"]
        assert {line["partition"] for line in lines} == {str(PARTITION), str(OTHER)}
        assert all(line["since"].endswith("+00:00") for line in lines)
        go_on.set()
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89])
        await until(lambda: max(stalled_seconds(running)) == 0)
        assert running.bench.active("copy-stalled") == 0
    assert [line.getMessage() for line in caplog.records].count("copying goes on") == stalls(running) == 2


async def test_a_slow_copy_that_moves_bytes_is_no_stalled_one(
    running: Running, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = running.bench.store.copy_log_segment_data

    def lag_seconds(partition: int) -> float:
        return running.bench.metric("remote_copy_lag_seconds", topic="orders", partition=str(partition))

    async def slow(metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        async with while_active(None) as activity:
            for _ in range(3):
                clock.passed_ms += ALARM_MS // 2
                activity.moved()
                # The watch has looked at it now.
                await until(lambda: lag_seconds(PARTITION.partition) >= clock.passed_ms / 1000)
        return await copy(metadata, data)

    monkeypatch.setattr(running.bench.store, "copy_log_segment_data", slow)
    running.topics = Topics(replace(POLICY, local_retention_bytes=0, partition_count=1))
    running.manager = RemoteLogManager(running.bench.services, running.topics)
    async with running.run():
        await until(lambda: running.remote_end(PARTITION) == 89)
        assert stalls(running) == 0
