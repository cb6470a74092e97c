"""The copy quota (KIP-956): one for all copying of a process, taken before any record is read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import BrokerError
from tiers.quota import QuotaWindow, RateQuota
from tiers.tasks.copy.copy_task import RLMCopyTask

PORTION_BYTES = 500


@pytest.fixture
def quota(bench: Workbench) -> RateQuota:
    """1000 bytes in any second."""
    quota = RateQuota(1000, QuotaWindow(1, 1000), lambda: bench.now_ms)
    bench.services = replace(bench.services, copy_quota=quota)
    bench.restart()
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])
    assert bench.services.settings.fetch_bytes == PORTION_BYTES
    return quota


async def test_copying_goes_on_where_the_quota_stopped_it(bench: Workbench, quota: RateQuota) -> None:
    assert not await bench.copy()
    first = bench.log.end_offset
    assert bench.copy_task.throttled_ms == 2000
    read_bytes = bench.copy_task.local_only_bytes + sum(one.segment_size_bytes for one in bench.segments)
    assert 1000 - PORTION_BYTES < read_bytes < 1000 + PORTION_BYTES
    reads = list(bench.log.reads)
    assert not await bench.copy()
    assert bench.log.reads == reads

    rounds = 0
    while bench.finished != [(0, 29), (30, 59), (60, 89)]:
        bench.now_ms += max(bench.copy_task.throttled_ms, 1)
        await bench.copy()
        rounds += 1
    assert rounds > 1
    assert bench.log.end_offset == first
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 89)
    assert bench.metric("remote_copy_throttle_time_seconds_count") >= 2


async def test_two_tasks_share_one_quota(bench: Workbench, quota: RateQuota) -> None:
    other = RLMCopyTask(bench.services, PARTITION, bench.attempts, bench.facts_task)
    try:
        await bench.copy_task.run(POLICY, await bench.log.bounds(PARTITION, 1000), 0)
        assert bench.copy_task.throttled_ms > 0
        reads = len(bench.log.reads)
        await other.run(POLICY, await bench.log.bounds(PARTITION, 1000), 0)
        assert other.throttled_ms > 0
        assert len(bench.log.reads) == reads
    finally:
        other.discard()


async def test_a_read_that_fails_uses_nothing_up(bench: Workbench, quota: RateQuota) -> None:
    bounds = await bench.log.bounds(PARTITION, 1000)
    bench.log.failure = BrokerError("no leader", retriable=True)
    for _ in range(10):
        with pytest.raises(BrokerError):
            await bench.copy_task.run(POLICY, bounds, 0)
    bench.log.failure = None
    assert quota.throttle_ms() == 0


async def test_old_segments_are_copied_although_the_quota_is_used_up(bench: Workbench, quota: RateQuota) -> None:
    while not bench.copy_task.local_only_bytes:
        bench.now_ms += 1000
        await bench.copy()
    bench.now_ms += POLICY.segment_ms
    assert quota.reserve(10_000) is not None
    await bench.copy()
    assert bench.copy_task.local_only_bytes == 0


async def test_a_partition_without_work_is_not_called_throttled(bench: Workbench, quota: RateQuota) -> None:
    while bench.finished != [(0, 29), (30, 59), (60, 89)]:
        bench.now_ms += 1000
        await bench.copy()
    bench.now_ms += 10_000
    await bench.copy()
    assert quota.reserve(10_000) is not None
    await bench.copy()
    assert bench.copy_task.throttled_ms == 0
