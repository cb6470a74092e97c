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
def quota(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> RateQuota:
    """1000 bytes in any second. Who sleeps lets the time pass."""

    async def sleep(seconds: float) -> None:
        bench.now_ms += int(1000 * seconds)

    monkeypatch.setattr("tiers.tasks.copy.copy_task.asyncio.sleep", sleep)
    quota = RateQuota(1000, QuotaWindow(1, 1000), lambda: bench.now_ms)
    bench.services = replace(bench.services, copy_quota=quota)
    bench.restart()
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])
    assert bench.services.settings.fetch_bytes == PORTION_BYTES
    return quota


async def test_a_copy_that_has_begun_waits_for_the_quota(bench: Workbench, quota: RateQuota) -> None:
    began_ms, size_bytes = bench.now_ms, len(bench.log.bytes_of(0, 89))
    while bench.finished != [(0, 29), (30, 59), (60, 89)]:
        bench.now_ms += bench.copy_task.throttled_ms
        await bench.copy()
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 89)
    # A sample counts until the window has passed behind it.
    assert size_bytes // 2 < bench.now_ms - began_ms < 3 * size_bytes
    assert bench.metric("remote_copy_throttle_time_seconds_count") >= 2


async def test_no_copy_begins_while_the_quota_is_used_up(bench: Workbench, quota: RateQuota) -> None:
    assert quota.reserve(1000) is not None
    other = RLMCopyTask(bench.services, PARTITION, bench.attempts, bench.facts_task)
    bounds = await bench.survey()
    other.uncopied.survey(await bench.log.size_bytes(PARTITION, 1000), bounds)
    for task in (bench.copy_task, other):
        assert not await task.run(POLICY, bounds, 0)
        assert task.throttled_ms == 2000
    assert (bench.finished, bench.spooled()) == ([], [])


async def test_a_read_that_fails_uses_nothing_up(bench: Workbench, quota: RateQuota) -> None:
    bounds = await bench.survey()
    await bench.copy_task.run(POLICY, bounds, 0)
    bench.now_ms += 10_000
    bench.log.failure = BrokerError("no leader", retriable=True)
    for _ in range(10):
        with pytest.raises(BrokerError):
            await bench.copy_task.run(POLICY, bounds, 30)
    bench.log.failure = None
    assert quota.throttle_ms() == 0
