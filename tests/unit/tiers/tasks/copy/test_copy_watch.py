"""A copy without progress is reported with its cause. The lag is measured also for a partition that is not copied."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.running_manager import OTHER, Running, Topics
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.broker.client import monotonic_ms
from tiers.errors import BrokerError, RetriableRemoteStorageError
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.quota import QuotaWindow, RateQuota
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
        log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])
    settings = replace(bench.services.settings, copy_stall_alarm_ms=ALARM_MS)
    bench.services = replace(bench.services, settings=settings, clock_ms=clock)
    running.manager = RemoteLogManager(bench.services, running.topics)
    return running


def stalls(running: Running) -> float:
    return running.bench.metric("remote_log_alarms_total", topic="orders", reason="copy-stalled")


def stalled_seconds(running: Running, partition: str) -> float:
    return running.bench.metric("remote_copy_stalled_seconds", topic="orders", partition=partition)


async def test_a_copy_to_a_silent_store_is_reported_with_its_partition_and_age(
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
        assert min(stalled_seconds(running, each) for each in "01") >= ALARM_MS / 1000
        lines = [vars(line) for line in caplog.records if line.getMessage() == "copying makes no progress"]
        assert {line["partition"] for line in lines} == {str(PARTITION), str(OTHER)}
        assert all(line["since"].endswith("+00:00") for line in lines)
        go_on.set()
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89])
        await until(lambda: max(stalled_seconds(running, each) for each in "01") == 0)
        assert running.bench.active("copy-stalled") == 0
    assert [line.getMessage() for line in caplog.records].count("copying goes on") == stalls(running) == 2


async def test_an_error_that_comes_back_is_the_reason_that_is_named(
    running: Running, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    running.logs.of[PARTITION].failure = BrokerError("no leader", retriable=True)
    async with running.run():
        # Ten minutes in the middle of a segment would end it by its age.
        await until(lambda: running.remote_end(OTHER) == 89)
        await until(lambda: said_of_failures(caplog) == {str(PARTITION)})
        clock.passed_ms = ALARM_MS
        await until(lambda: (str(PARTITION), "no leader") in stalled(caplog))


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


def stalled(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The partitions that were said to make no progress, and why."""
    lines = [vars(line) for line in caplog.records if line.getMessage() == "copying makes no progress"]
    return [(line["partition"], line["error"]) for line in lines]


@pytest.mark.parametrize("refused", ["copy and delete", "copy"])
async def test_attempts_that_fail_again_and_again_are_no_progress(
    running: Running, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    """Each writes the same records anew."""
    store = running.bench.store
    monkeypatch.setattr(store, "copy_log_segment_data", unavailable)
    if refused == "copy and delete":
        monkeypatch.setattr(store, "delete_log_segment_data", unavailable)
    async with running.run():
        await until(lambda: said_of_failures(caplog) >= {str(PARTITION), str(OTHER)})
        clock.passed_ms = ALARM_MS
        await until(lambda: stalls(running) == 2)
    assert all("503" in error for _, error in stalled(caplog))
    assert running.bench.finished == []


async def test_copies_that_cannot_be_read_back_are_no_progress(
    running: Running, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner stores the segments behind the first one, too, and reads them back again and again."""
    refused: list[tuple[TopicIdPartition, int]] = []

    async def refuses(segment: RemoteLogSegmentMetadata, *args: object) -> memoryview:
        refused.append((segment.topic_id_partition, segment.end_offset))
        raise RetriableRemoteStorageError("503")

    monkeypatch.setattr(running.bench.store, "fetch_log_segment", refuses)
    running.topics.policies = {POLICY.topic_id: replace(POLICY, partition_count=2, segment_ms=0)}
    async with running.run():
        await until(lambda: set(refused) >= {(PARTITION, 99), (OTHER, 99)})
        refused.clear()
        await until(lambda: min([one for one, _ in refused].count(each) for each in (PARTITION, OTHER)) > 3)
        clock.passed_ms = ALARM_MS
        await until(lambda: stalls(running) == 2)
    assert all("503" in error for _, error in stalled(caplog))
    assert running.bench.finished == []


async def unavailable(*args: object) -> bool:
    raise RetriableRemoteStorageError("503")


def said_of_failures(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Returns the reported partitions."""
    return {vars(line)["partition"] for line in caplog.records if line.getMessage() == "a stage of a partition failed"}


async def test_a_partition_that_waits_for_a_copier_is_reported_too(
    running: Running, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = asyncio.Event()

    async def stuck(*args: object) -> bytes | None:
        held.set()
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(running.bench.store, "copy_log_segment_data", stuck)
    services = running.bench.services
    remote_log = services.settings.remote_log.model_copy(update={"copier_threads": 1})
    settings = replace(services.settings, remote_log=remote_log, stop_timeout_ms=20)
    running.manager = RemoteLogManager(replace(services, settings=settings), running.topics)
    async with running.run():
        await held.wait()
        clock.passed_ms = ALARM_MS
        await until(lambda: stalls(running) == 2)


async def test_a_quota_that_leaves_nothing_is_reported(running: Running, clock: Clock) -> None:
    services = running.bench.services
    quota = RateQuota(1, QuotaWindow(1, 10 * ALARM_MS), clock)
    assert quota.reserve(10_000) is not None
    running.manager = RemoteLogManager(replace(services, copy_quota=quota), running.topics)
    async with running.run():
        await until(lambda: len(running.manager.partitions) == 2)
        clock.passed_ms = ALARM_MS
        await until(lambda: stalls(running) == 2)
    assert running.bench.finished == []


async def test_partitions_without_work_are_not_reported(
    running: Running, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, watch = 0, running.manager._watch_progress

    def counted(managed: Any) -> None:
        nonlocal looks
        looks += 1
        watch(managed)

    async def a_while() -> None:
        seen_looks = looks
        await until(lambda: looks > seen_looks + 4)

    monkeypatch.setattr(running.manager, "_watch_progress", counted)
    async with running.run():
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89])
        for _ in range(4):
            clock.passed_ms += ALARM_MS // 2
            await a_while()
    assert stalls(running) == 0


async def test_lag_is_measured_where_copying_fails_or_was_stopped(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*args: object) -> bytes | None:
        raise RetriableRemoteStorageError("503")

    async def talkative(*args: object) -> bytes | None:
        await copy(*args)  # type: ignore[arg-type]  # handed through
        return b"x" * 1000

    copy = running.bench.store.copy_log_segment_data

    def lag(name: str, partition: str = "0") -> float:
        return running.bench.metric(f"remote_copy_lag_{name}", topic="orders", partition=partition)

    monkeypatch.setattr(running.bench.store, "copy_log_segment_data", fails)
    log = running.logs.of[PARTITION]
    whole = len(log.records)
    async with running.run():
        await until(lambda: whole * 0.9 < lag("bytes") <= whole * 1.1)
        assert lag("segments") == whole // POLICY.segment_bytes
        await until(lambda: lag("seconds") > 0.1)
        monkeypatch.setattr(running.bench.store, "copy_log_segment_data", talkative)
        await until(lambda: running.is_stopped(PARTITION))
        log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10, 30)])
        await until(lambda: 2.7 * whole < lag("bytes") <= 3.3 * whole)
