from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import uuid4

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment
from tests.support.tiers.running_manager import OTHER, Held, Running
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import BrokerError, LogDivergedError, RetriableRemoteStorageError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.tasks.copy.segment_copy import announce, keep, store
from tiers.tasks.copy.spool import KeptSegment, SpoolError
from tiers.tasks.remote_log_manager import RemoteLogManager


@pytest.fixture
def running(bench: Workbench) -> Running:
    running = Running(bench, replace(POLICY, local_retention_bytes=0))
    running.produce(0, 100)
    return running


async def test_every_owned_partition_is_copied_and_trimmed(running: Running) -> None:
    async with running.run():
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89])
        await until(lambda: all(log.log_start_offset == 60 for log in running.logs.of.values()))
        assert sorted(running.manager.partitions, key=lambda each: each.partition) == [PARTITION, OTHER]
    assert running.bench.metric("bounds_violations_total", topic="orders", bound="Ly>Ry") == 0


async def test_a_beginning_that_was_never_copied_is_copied_before_a_trim(running: Running) -> None:
    """A broker lost its log start, and has records again that it had removed before they were copied."""
    log, alarm = running.logs.of[PARTITION], {"topic": "orders", "reason": "uncopied-beginning"}
    log.log_start_offset = 20
    async with running.run():
        await until(lambda: log.log_start_offset == 50)
        assert running.bench.metric("remote_log_alarms_total", **alarm) == 0
        log.log_start_offset = 0
        await until(lambda: log.log_start_offset >= 50)
        await until(lambda: running.bench.active("uncopied-beginning") == 0)
    assert running.bench.metric("remote_log_alarms_total", **alarm) == 1
    assert running.bench.finished[:2] == [(0, 29), (20, 49)]


@pytest.mark.parametrize("error", [BrokerError("no leader", retriable=True), ZeroDivisionError("bug")])
async def test_a_failing_partition_is_retried_and_leaves_the_others_alone(
    running: Running, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    failing = running.logs.of[PARTITION]
    failing.failure = error
    async with running.run():
        await until(lambda: running.remote_end(OTHER) == 89)
        assert running.remote_end(PARTITION) is None
        failing.failure = None
        await until(lambda: running.remote_end(PARTITION) == 89)
    said = [line.getMessage() for line in caplog.records if line.exc_info]
    assert ("a stage of a partition failed" in said) is isinstance(error, ZeroDivisionError)


async def some_rounds(running: Running) -> None:
    rounds = running.topics.refreshes + 5
    await until(lambda: running.topics.refreshes >= rounds)


async def test_a_partition_that_stops_is_one_alarm_until_it_goes_on(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    log, error = running.logs.of[PARTITION], LogDivergedError("it diverged")
    async with running.run():
        await until(lambda: running.remote_end(PARTITION) == 89)
        survey = running.manager._managed[PARTITION].stages["survey"]
        for episode in (1, 2):
            log.failure = error
            await until(lambda: survey.failures > 2)
            log.failure = BrokerError("no leader", retriable=True)  # which ends no episode
            await until(lambda: survey.last_error == "no leader")
            log.failure = error
            await until(lambda: survey.last_error == str(error))
            said = [line.levelname for line in caplog.records if "diverged" in line.getMessage()]
            alarms = running.bench.metric("remote_log_alarms_total", topic="orders", reason="diverged")
            assert (alarms, said.count("ERROR")) == (episode, episode)
            assert running.bench.active("diverged") == 1
            log.failure = None
            await until(lambda: survey.failures == 0)
            await until(lambda: running.bench.active("diverged") == 0)


async def test_partitions_of_another_owner_are_given_up(running: Running) -> None:
    async with running.run():
        await until(lambda: running.remote_end(PARTITION) == 89)
        running.bench.metadata.owned = False
        await until(lambda: running.manager.partitions == [])
        await until(lambda: all(path.suffix != ".spool" for path in running.bench.spooled()))
        assert running.bench.metric("owned_partitions") == 0


async def test_the_owner_counts_failed_deletions(running: Running) -> None:
    bench, failed = running.bench, running.bench.services.failed_deletions
    async with running.run():
        await until(lambda: running.remote_end(PARTITION) == 89)
        await failed.failed(bench.segments[0], RetriableRemoteStorageError("AccessDenied"), 0, 0)
        await until(lambda: bench.metric("remote_failed_deletions") == 1)
        await some_rounds(running)
        assert failed.count == 1
        bench.metadata.owned = False
        await until(lambda: bench.metric("remote_failed_deletions") == 0)
        assert failed.count == 0


async def test_a_copy_in_progress_is_finished_before_the_manager_ends(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Held(monkeypatch, running.bench.store, "copy_log_segment_data")
    async with running.run():
        await copies.reached.wait()
        running.manager.stop()
        copies.go_on.set()
    assert 29 in (running.remote_end(PARTITION), running.remote_end(OTHER))
    assert running.bench.spooled() == []


async def test_a_copy_that_does_not_end_is_cancelled_at_the_deadline(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Held(monkeypatch, running.bench.store, "copy_log_segment_data")
    services = running.bench.services
    services = replace(services, settings=replace(services.settings, stop_timeout_ms=20))
    running.manager = RemoteLogManager(services, running.topics)
    async with running.run():
        await copies.reached.wait()
    assert running.bench.finished == []
    assert {path.suffix for path in running.bench.spooled()} == {".log", ".indexes"}


async def keep_segment(bench: Workbench, partition: TopicIdPartition, first: int) -> KeptSegment:
    """Leaves a segment in the spool, as a member that lost the partition does."""
    records = [batch_of(at, 10, value_bytes=15) for at in range(first, first + 30, 10)]
    built = build_segment(bench.folder / f"{first}.built", records, first)
    kept = await keep(bench.services, RemoteLogSegmentId(partition, uuid4()), built, 0)
    await announce(bench.services, kept.metadata)
    return kept


async def test_a_damaged_kept_segment_keeps_no_other_from_being_stored(bench: Workbench) -> None:
    running = Running(bench, POLICY)
    damaged = await keep_segment(bench, PARTITION, 0)
    await store(bench.services, damaged)
    [path] = (bench.folder / "remote").rglob("*.indexes")
    path.write_bytes(path.read_bytes()[:-10])
    for partition in (PARTITION, OTHER):
        await keep_segment(bench, partition, 30)
    bench.metadata.owned = False
    async with running.run():
        await until(lambda: len([*(bench.folder / "remote").rglob("*.indexes")]) == 3, 30)


async def test_a_disk_that_is_full_at_the_start_delays_the_manager(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process owns its partitions already. If its manager ended, no process would copy them."""
    spool, failures = running.bench.services.spool, 3
    open_spool = spool.open

    async def full() -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise SpoolError("no space left on device")
        await open_spool()

    monkeypatch.setattr(spool, "open", full)
    async with running.run():
        await until(lambda: running.remote_end(PARTITION) == 89)
    assert "the spool cannot be opened: nothing is copied" in caplog.messages


async def test_settings_that_change_do_not_end_the_pauses_before_a_full_disk(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process applies its settings when it starts. Without the pauses, it would take a whole core."""
    attempts, asked = 0, asyncio.Event()

    async def full() -> None:
        nonlocal attempts
        attempts += 1
        asked.set()
        await asyncio.sleep(0)
        raise SpoolError("no space left on device")

    services = running.bench.services
    remote_log = services.settings.remote_log.model_copy(update={"task_retry_backoff_ms": 3_600_000})
    services = replace(services, settings=replace(services.settings, remote_log=remote_log))
    monkeypatch.setattr(services.spool, "open", full)
    running.manager = RemoteLogManager(services, running.topics)
    running.manager.settings_changed()
    async with running.run():
        await asyncio.wait_for(asked.wait(), 60)
        for _ in range(100):
            await asyncio.sleep(0)
        assert attempts == 1


async def test_too_much_custom_metadata_stops_copying_for_good(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, copy = 0, running.bench.store.copy_log_segment_data

    async def talkative(metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        nonlocal attempts
        attempts += 1
        await copy(metadata, data)
        return b"x" * 1000

    monkeypatch.setattr(running.bench.store, "copy_log_segment_data", talkative)
    deletions = Held(monkeypatch, running.bench.store, "delete_log_segment_data")
    async with running.run():
        await until(lambda: len(deletions.firsts) == 2)
        await some_rounds(running)
        deletions.go_on.set()
        await until(lambda: all(running.is_stopped(each) for each in (PARTITION, OTHER)))
        await some_rounds(running)
    assert [attempts, len(deletions.firsts)] == [2, 2]
