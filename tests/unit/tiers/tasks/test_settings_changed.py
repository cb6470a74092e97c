"""The manager follows settings that change while work is in progress."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.tiers.running_manager import OTHER, Held, Running
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.topic_policy import TierWork
from tiers.quota import QuotaWindow, RateQuota
from tiers.tasks.remote_log_manager import RemoteLogManager

BOTH = [PARTITION, OTHER]


@pytest.fixture
def running(bench: Workbench) -> Running:
    running = Running(bench, POLICY)
    running.produce(0, 100)
    return running


async def copied(running: Running) -> None:
    await until(lambda: [running.remote_end(each) for each in BOTH] == [89, 89])


def change(running: Running, **fields: Any) -> None:
    (policy,) = running.topics.policies.values()
    running.topics.policies = {policy.topic_id: replace(policy, **fields)}
    running.manager.settings_changed()


@pytest.mark.parametrize("by", ["policy", "recorded total", "pause"])
async def test_a_waiting_log_start_ends_when_its_settings_change(
    running: Running, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    metadata, log = running.bench.metadata, running.logs.of[PARTITION]
    changes = {"recorded total": {"remote.log.retention.bytes": "10000"}, "pause": {TierWork.EXPIRING.key: "true"}}
    async with running.run():
        await copied(running)
        writing = Held(monkeypatch, metadata, "put_log_start")
        change(running, retention_bytes=0)
        await writing.reached.wait()
        if by == "policy":
            change(running, retention_bytes=-1)
        else:
            await metadata.change_topic_tier_config(PARTITION.topic_id, PARTITION.topic, changes[by])
        looks = log.surveys
        writing.go_on.set()
        await until(lambda: log.surveys > looks + 4)
        assert metadata.state.log_starts(PARTITION) == metadata.state.log_starts(OTHER) == []


async def test_a_trim_in_progress_ends_when_its_local_retention_is_replaced(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_groups, log = running.bench.share_groups, running.logs.of[PARTITION]
    async with running.run():
        await copied(running)
        asking = Held(monkeypatch, share_groups, "lowest_start")
        change(running, local_retention_bytes=0)
        await asking.reached.wait()
        change(running, local_retention_bytes=None)
        asking.go_on.set()
        surveys = log.surveys
        await until(lambda: log.surveys > surveys + 4)
        assert (log.trims, running.logs.of[OTHER].trims) == ([], [])
        change(running, local_retention_bytes=0)
        await until(lambda: log.trims == [60])


async def test_a_partition_that_is_tiered_no_more_is_given_up_at_once(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart: no copy, no trim and no expiry, and what is copied stays."""
    store, logs = running.bench.store, running.logs.of
    async with running.run():
        await copied(running)
        copying = Held(monkeypatch, store, "copy_log_segment_data")
        running.produce(100, 200)
        await copying.reached.wait()
        policies, running.topics.policies = running.topics.policies, {}
        running.manager.settings_changed()
        assert running.manager.partitions == []
        await copying.cancelled.wait()
        assert [running.remote_end(each) for each in BOTH] == [89, 89]
        assert [log.trims for log in logs.values()] == [[], []]
        assert running.bench.state.log_starts(PARTITION) == []
        copying.go_on.set()
        running.topics.policies = policies
        running.manager.settings_changed()
        await until(lambda: [running.remote_end(each) for each in BOTH] == [179, 179])


async def test_the_topics_are_read_again_when_the_settings_change(running: Running) -> None:
    running.bench.services = replace(running.bench.services, clock_ms=lambda: 1000)
    running.manager = RemoteLogManager(running.bench.services, running.topics)
    async with running.run():
        await until(lambda: running.topics.refreshes == 1)
        running.manager.settings_changed()
        await until(lambda: running.topics.refreshes == 2)


async def test_a_throttled_copy_goes_on_when_its_quota_is_raised(running: Running) -> None:
    quota = RateQuota(1, QuotaWindow(1, 1000), lambda: 1000)
    assert quota.reserve(10_000) is not None
    running.bench.services = replace(running.bench.services, clock_ms=lambda: 1000, copy_quota=quota)
    running.bench.metadata.clock_ms = lambda: 1000
    running.manager = RemoteLogManager(running.bench.services, running.topics)
    async with running.run():
        await until(lambda: running.bench.metric("remote_copy_throttle_time_seconds_count") == 2)
        assert [running.remote_end(each) for each in BOTH] == [None, None]
        quota.change(None, QuotaWindow())
        running.manager.settings_changed()
        await copied(running)
