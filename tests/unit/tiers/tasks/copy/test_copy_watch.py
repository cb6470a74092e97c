"""A copy without progress is reported, and one that moves bytes is not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.tiers.attempts import batches, whole_rounds
from tests.support.tiers.interposed import refuse
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import BrokerError
from tiers.metadata.metadata_log import Tenure
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.quota import QuotaWindow, RateQuota
from tiers.storage.activity import while_active
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.tasks.partition_tasks import PartitionTasks

ALARM_MS = 120_000
STALLED, GOES_ON = "copying makes no progress", "copying goes on"


def owner(bench: Workbench) -> PartitionTasks:
    bench.log.append(*batches(0, 100))
    bench.services = replace(bench.services, settings=replace(bench.services.settings, copy_stall_alarm_ms=ALARM_MS))
    return PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))


async def minutes(bench: Workbench, tasks: PartitionTasks, count: int) -> tuple[float, float]:
    """Lets a round begin every minute. Returns how many partitions are stalled, and for how many seconds."""
    for _ in range(count):
        await whole_rounds(bench, tasks, 1)
        tasks.watch_progress()
    stalled_s = bench.metric("remote_copy_stalled_seconds", topic="orders", partition="0")
    return bench.active("copy-stalled"), stalled_s


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        ("copy_log_segment_data", "503"),
        ("fetch_log_segment", "503"),
        ("the broker", "no leader"),
        ("the quota", "none"),
        ("", ""),
    ],
)
async def test_attempts_that_fail_again_are_no_progress(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str, error: str
) -> None:
    """Each writes the same records anew. A partition without work has no need of progress."""
    caplog.set_level("INFO", "tiers.tasks.partition_watch")
    quota = RateQuota(1 if refused == "the quota" else None, QuotaWindow(1, 3_600_000), lambda: bench.now_ms)
    quota.exceed(1 << 40)
    bench.services = replace(bench.services, copy_quota=quota)
    tasks = owner(bench)
    with monkeypatch.context() as failing:
        if refused == "the broker":
            bench.log.failure = BrokerError(error, retriable=True)
        elif hasattr(bench.store, refused):
            refuse(failing, bench.store, refused)
        count, stalled_s = await minutes(bench, tasks, 10)
        assert (count, stalled_s > ALARM_MS / 1000) == ((1, True) if refused else (0, False))
    lines = [vars(line) for line in caplog.records if line.getMessage() == STALLED]
    assert bool(lines) == bool(refused)
    assert all(error in line["error"] and line["since"].endswith("+00:00") for line in lines)
    bench.log.failure = None
    quota.change(None, QuotaWindow())
    assert await minutes(bench, tasks, 65) == (0, 0)
    assert bench.finished == [(0, 29), (30, 59), (60, 89), (90, 99)]
    assert caplog.messages.count(GOES_ON) == len(lines)


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_slow_copy_that_moves_bytes_is_no_stalled_one(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    copy, tasks, stalls = bench.store.copy_log_segment_data, owner(bench), list[float]()

    async def slow(metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        async with while_active(None) as activity:
            for _ in range(3):
                bench.now_ms += ALARM_MS
                if not is_silent:
                    activity.moved()
                tasks.watch_progress()
                stalls.append(bench.active("copy-stalled"))
        return await copy(metadata, data)

    monkeypatch.setattr(bench.store, "copy_log_segment_data", slow)
    surveyed = await tasks.round()
    assert surveyed is not None
    tasks.running["copy"] = asyncio.create_task(tasks.run_copy(surveyed))
    await tasks.running["copy"]
    assert set(stalls) == {int(is_silent)}
