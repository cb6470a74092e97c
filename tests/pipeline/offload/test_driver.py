"""The driver of an offload: an error of one partition's broker ends that partition alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.chosen_partitions import NothingChosenError
from pipeline.offload import job
from pipeline.offload.driver import OffloadDriver, OffloadOptions
from pipeline.offload.task import CopiedTile, OffloadResult, StopError, TileCopier
from tests.support.fakes.record_batches import batch_of
from tests.support.pipeline.one_offload import CONFIG
from tests.support.tiers.recorded_progress import RecordedProgress
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.broker.client import Leader
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import BrokerError, OffsetGapError, RetriableRemoteStorageError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead
from tiers.segment.segment_encryption import KeyRing
from tiers.tasks.history.stored_facts import FactsTask

SILENT = replace(PARTITION, partition=1)
FAR = 2**31 + 1000


class Client:
    """A broker client that names leaders until a test stops it, and knows nothing of disks."""

    is_silent = False

    async def leader_of(self, partition: TopicIdPartition, timeout_ms: int) -> Leader:
        if self.is_silent and partition == SILENT:
            raise BrokerError("no leader", retriable=True)
        return Leader(1, 0)

    async def request(self, *args: object, **options: object) -> object:
        raise BrokerError("CLUSTER_AUTHORIZATION_FAILED")


def driver_of(
    bench: Workbench, client: Client, options: OffloadOptions, segment_bytes: int = POLICY.segment_bytes
) -> OffloadDriver:
    cluster = SimpleNamespace(cluster_id="cluster")
    known = bench.metadata
    tier: Any = SimpleNamespace(client=client, metadata=known, log=known.log, state=known.state, cluster=cluster)
    policies = [replace(POLICY, partition_count=2, segment_bytes=segment_bytes)]

    async def pause(seconds: float) -> None:
        bench.now_ms += int(seconds * 1000)

    driver = OffloadDriver(tier, CONFIG, options, policies, 1, bench.services, sleep=pause)
    driver._committer = replace(driver._committer, sleep=pause)
    return driver


async def test_a_partition_without_a_leader_for_a_moment_is_still_copied(bench: Workbench) -> None:
    client = Client()
    client.is_silent = True
    driver = driver_of(bench, client, OffloadOptions(max_age_ms=0))
    await driver.survey()
    assert [task.partition for task in await driver.next_wave()] == [PARTITION, SILENT]
    assert driver.report(1.0).troubles == []


async def test_a_leaderless_partition_is_not_announced_while_reads_are_limited(bench: Workbench) -> None:
    client = Client()
    driver = driver_of(bench, client, OffloadOptions(max_bytes_per_second_per_broker=1000))
    await driver.survey()
    client.is_silent = True
    [task] = await driver.next_wave()
    assert (task.partition, task.bytes_per_second) == (PARTITION, 1000)
    assert bench.state.copy_plans(SILENT) == []
    assert [(one.partition, one.error) for one in driver.report(1.0).troubles] == [(1, "no leader")]


@pytest.mark.parametrize("failures", [2, 3])
async def test_a_store_is_asked_again_as_often_before_a_wave_as_after_it(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    driver = driver_of(bench, Client(), OffloadOptions(max_age_ms=0))
    await driver.survey()
    asked = 0

    async def silent_at_first(facts: FactsTask, *arguments: object) -> None:
        nonlocal asked
        asked += 1
        if asked <= 2 * failures:
            raise RetriableRemoteStorageError("no answer in 30 s")

    monkeypatch.setattr(FactsTask, "check", silent_at_first)
    tasks = await driver.next_wave()
    assert len(tasks) == (2 if failures < 3 else 0)
    assert [one.is_over for one in driver.partitions] == [not tasks] * 2
    assert [one.error for one in driver.report(1.0).troubles] == ["no answer in 30 s"] * 2


async def test_a_dry_run_says_what_it_cannot_look_at_and_goes_on(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = OffsetGapError("trimmed meanwhile")
    told = RecordedProgress()
    bench.services = replace(bench.services, say=told.say)
    driver = driver_of(bench, Client(), OffloadOptions())
    await driver.survey()
    read = bench.log.read

    async def silent(partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        if partition == SILENT:
            raise trouble
        return await read(partition, offset, max_bytes, timeout_ms)

    monkeypatch.setattr(bench.log, "read", silent)
    planned = [await driver.planned(one) for one in driver.partitions]
    assert [one.segments > 0 for one in planned] == [True, False]
    assert told.said == [f"offload: {SILENT}: {trouble}"]


async def run_waves(bench: Workbench, options: OffloadOptions, segment_bytes: int) -> OffloadDriver:
    """Offloads the bench's partition in this process."""
    driver = driver_of(bench, Client(), options, segment_bytes)
    driver.partitions = [one for one in driver.partitions if one.partition == PARTITION]
    await driver.survey()
    while (tasks := await driver.next_wave()) and driver.waves < 40:
        results = []
        for task in tasks:
            copier = TileCopier(task, bench.log, bench.store, bench.services.spool, KeyRing())
            copied: list[CopiedTile] = []
            stopped = None
            try:
                for number, tile in enumerate(task.tiles(0)):
                    copied.append(await copier.copy(number, tile))
            except StopError as stop:
                stopped = replace(stop.stopped, tile=len(copied))
            results.append(OffloadResult(tuple(copied), stopped))
        await driver.commit(results)
    assert driver.report(1.0).troubles == []
    return driver


async def test_a_hole_of_more_offsets_than_a_segment_can_count_is_copied_over(bench: Workbench) -> None:
    bench.log.records = b""
    for start in (FAR, 2 * FAR):
        bench.log.append(*(batch_of(start + 10 * number, 10) for number in range(8)))
    driver = await run_waves(bench, OffloadOptions(max_age_ms=0), 1 << 28)
    assert await bench.remote_bytes() == bench.log.records
    assert driver.waves < 20


async def test_a_run_ends_at_its_limit_and_leaves_a_small_young_end(bench: Workbench) -> None:
    young, segment_bytes = OffloadOptions(max_age_ms=1 << 60), 2 * len(bench.log.records) // 9
    await run_waves(bench, replace(young, max_bytes=1), segment_bytes)
    assert len(bench.finished) == 1
    await run_waves(bench, young, segment_bytes)
    assert 0 < len(bench.log.records) - len(await bench.remote_bytes()) < segment_bytes
    await run_waves(bench, OffloadOptions(max_age_ms=0), segment_bytes)
    assert await bench.remote_bytes() == bench.log.records


async def test_a_pattern_that_matches_no_copied_topic_is_misuse(monkeypatch: pytest.MonkeyPatch) -> None:
    async def policies(tier: object) -> list[TopicPolicy]:
        return [replace(POLICY, topic="orders"), replace(POLICY, topic="logs", copy_disable=True)]

    monkeypatch.setattr(job, "tiered_policies", policies)
    tier: Any = SimpleNamespace()
    assert [each.topic for each in await job._policies(tier, OffloadOptions(topics=".*"))] == ["orders"]
    for topics, said in (("ordrs", "matches 'ordrs'; did you mean orders?"), ("logs", "matches 'logs'")):
        with pytest.raises(NothingChosenError) as raised:
            await job._policies(tier, OffloadOptions(topics=topics))
        assert str(raised.value) == f"no tiered topic with copying enabled {said}"
