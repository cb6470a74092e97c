"""A stage that fails stops itself: the other stages of the partition go on, as far as they do not need its work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from tests.support.fakes.in_memory_log import DamagedLog
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.attempts import batches
from tests.support.tiers.interposed import before, refuse
from tests.support.tiers.running_manager import OTHER, Running
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench
from tiers.errors import (
    LogDivergedError,
    MetadataLostError,
    Peer,
    RemoteLogMetadataNotReadyError,
    RetriableRemoteStorageError,
)
from tiers.metadata.metadata_log import Tenure
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import LogGap, LogStart, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.storage.outages import BEGINS_AFTER_MS, StoreOutage, StoreOutages
from tiers.storage.remote_storage_manager import StoredObject
from tiers.tasks.history.log_gap_task import LogGapTask
from tiers.tasks.partition_tasks import PartitionTasks
from tiers.tasks.remote_log_manager import RemoteLogManager

TRIMMING = replace(POLICY, partition_count=1, local_retention_bytes=0)
EXPIRING = replace(TRIMMING, retention_bytes=0)
STARTED = RemoteLogSegmentState.COPY_SEGMENT_STARTED


@pytest.fixture
def running(bench: Workbench) -> Running:
    running = Running(bench, TRIMMING)
    running.logs.of[PARTITION] = DamagedLog()
    running.topics.policies = {TRIMMING.topic_id: TRIMMING}
    running.produce(0, 100)
    return running


def set_policy(running: Running, policy: Any) -> None:
    running.topics.policies = {policy.topic_id: policy}


def failures(running: Running, stage: str) -> float:
    return running.bench.metric("remote_log_stage_failures_total", topic="orders", stage=stage)


def remote_start(running: Running) -> int | None:
    return running.bench.state.earliest_offset(PARTITION)


def is_copied_and_trimmed(running: Running, to: int) -> bool:
    copied = [running.remote_end(each) or 0 for each in (PARTITION, OTHER)]
    return min(*copied, *(log.log_start_offset for log in running.logs.of.values())) >= to


async def test_a_damaged_batch_costs_no_readable_record_before_it(bench: Workbench) -> None:
    """One Fetch returns several batches, and the removal of the damaged one removes all of them from the broker."""
    bench.services = replace(bench.services, settings=replace(bench.services.settings, gap_alarm_ms=1))
    running, log = Running(bench, POLICY), DamagedLog()
    running.logs.of[PARTITION] = log
    batches = [batch_of(10 * n, 10, value_bytes=1) for n in range(20)]
    log.append(*batches)
    log.damaged_offset = 120
    assert 3 * len(batches[0]) < bench.services.settings.fetch_bytes < 4 * len(batches[0])
    async with running.run():
        await until(lambda: failures(running, "copy") > 1)
        log.log_start_offset = 130
        await until(lambda: (running.remote_end(PARTITION) or 0) > 130)
    assert bench.state.gaps(PARTITION) == [LogGap(120, 130)]
    assert bench.finished[:2] == [(0, 59), (60, 119)]


class Store:
    """The operations that the store refuses, or never answers."""

    def __init__(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: set[str] = set()
        self.hanging: set[str] = set()
        self.asked: list[str] = []
        store: Any = running.bench.store
        for name in ("copy_log_segment_data", "put_object", "delete_log_segment_data"):
            monkeypatch.setattr(store, name, self._guarded(name, getattr(store, name)))

    def _guarded(self, name: str, call: Any) -> Any:
        async def guarded(*arguments: Any) -> Any:
            self.asked.append(name)
            if name in self.refused:
                raise RetriableRemoteStorageError("503 Slow Down")
            await until(lambda: name not in self.hanging)
            return await call(*arguments)

        return guarded


@pytest.fixture
def store(running: Running, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(running, monkeypatch)


async def test_a_batch_that_cannot_be_read_stops_no_trim_and_no_expiry(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """The lasting failure is logged less and less."""
    log = running.logs.of[PARTITION]
    assert isinstance(log, DamagedLog)
    log.damaged_offset = 70
    running.produce(100, 120)
    async with running.run():
        await until(lambda: failures(running, "copy") >= 9)
        assert running.remote_end(PARTITION) == 69, "the records before the damaged batch"
        await until(lambda: log.log_start_offset == 60)
        set_policy(running, EXPIRING)
        await until(lambda: log.log_start_offset == 70 and remote_start(running) is None)
        assert failures(running, "expiry") == failures(running, "trim") == failures(running, "survey") == 0
        log.damaged_offset = -1
        # The copied segment expires at once.
        await until(lambda: log.log_start_offset >= 90)
    lines = [vars(line) for line in caplog.records if line.getMessage() == "a stage of a partition failed"]
    assert [line["failures"] for line in lines if line["stage"] == "copy"][:4] == [1, 2, 4, 8]


async def test_copies_that_hang_hold_up_no_trim_and_no_expiry(running: Running, store: Store) -> None:
    restart_with_one_place(running)
    log = running.logs.of[PARTITION]
    set_policy(running, replace(POLICY, partition_count=2))
    async with running.run():
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89])
        store.hanging = {"copy_log_segment_data"}
        store.asked.clear()
        running.produce(100, 200)
        await until(lambda: "copy_log_segment_data" in store.asked)
        set_policy(running, replace(TRIMMING, partition_count=2))
        await until(lambda: all(each.log_start_offset == 60 for each in running.logs.of.values()))
        set_policy(running, replace(EXPIRING, partition_count=2))
        await until(lambda: all(each.log_start_offset >= 90 for each in running.logs.of.values()))
        await until(lambda: remote_start(running) is None)
        store.hanging.clear()
        await until(lambda: log.log_start_offset >= 150)  # records that were copied


async def test_a_divergence_ends_the_round_in_progress(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trim that runs beside the round finds that the leader has another history than the round has checked."""
    tasks, copy_start = PartitionTasks(bench.services, PARTITION, TRIMMING, Tenure(0, 0)), LogGapTask.copy_start
    bench.log.append(*batches(0, 100))

    async def diverging(task: LogGapTask, *arguments: Any) -> int | None:
        tasks.stop(LogDivergedError("the leader has another history"), "trim")
        return await copy_start(task, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(LogGapTask, "copy_start", diverging)
        assert await tasks.round() is None
    assert [tasks.stages[name].failures for name in ("survey", "trim", "copy")] == [1, 1, 0]
    bench.now_ms += bench.services.settings.remote_log.task_interval_ms
    assert await tasks.round() is not None, "the next survey compared the histories itself"
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="diverged") == 0


async def test_deletions_that_hang_hold_up_no_copy_and_no_trim(running: Running, store: Store) -> None:
    restart_with_one_place(running)
    store.hanging = {"delete_log_segment_data"}
    set_policy(running, replace(EXPIRING, partition_count=2))
    async with running.run():
        await until(lambda: "delete_log_segment_data" in store.asked)
        for end in (20, 30):
            running.produce(10 * end - 100, 10 * end)
            await until(partial(is_copied_and_trimmed, running, 10 * end - 40))
        store.hanging.clear()


@pytest.mark.parametrize("are_expired", [True, False])
async def test_a_doubt_ends_the_deletions_in_progress(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, are_expired: bool
) -> None:
    bench.log.append(*batches(0, 100))
    await bench.copy_all()
    if not are_expired:
        for segment in bench.segments:
            again = replace(segment, segment_id=RemoteLogSegmentId(PARTITION, uuid4()), state=STARTED)
            await bench.metadata.add_remote_log_segment_metadata(again)
    tasks = PartitionTasks(bench.services, PARTITION, EXPIRING if are_expired else POLICY, Tenure(0, 0))
    surveyed = await tasks.round()
    assert surveyed is not None
    deleted = []

    def survey(segment: RemoteLogSegmentMetadata) -> None:
        deleted.append(segment.start_offset)
        tasks.facts.doubt = MetadataLostError("the metadata has lost segments")

    before(monkeypatch, bench.store, "delete_log_segment_data", survey)
    await tasks.run_deletion(surveyed)
    assert tasks.doubt
    assert deleted == [0]


async def test_an_expiry_that_fails_stops_no_copy_and_no_trim(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = RemoteLogMetadataNotReadyError("the skew is not known")
    refuse(monkeypatch, running.bench.metadata, "clock_skew_ms", unknown)
    set_policy(running, EXPIRING)
    services = running.bench.services
    running.manager = RemoteLogManager(
        replace(services, settings=replace(services.settings, stage_alarm_ms=1)), running.topics
    )
    caplog.set_level("INFO", "tiers.tasks.task_services")
    async with running.run():
        await until(lambda: running.remote_end(PARTITION) == 89 and failures(running, "expiry") > 2)
        await until(lambda: running.logs.of[PARTITION].log_start_offset == 60)
        await until(
            lambda: running.bench.metric("remote_log_alarms_total", topic="orders", reason="stage-failing") == 1
        )
        assert running.bench.active("stage-failing") == 1
        assert remote_start(running) == 0
        monkeypatch.undo()
        await until(lambda: remote_start(running) is None)
        await until(lambda: "a stage of a partition works again" in caplog.messages)
        assert running.bench.active("stage-failing") == 0
    said = [vars(line) for line in caplog.records if line.getMessage() == "a stage of a partition keeps failing"]
    assert [(line["stage"], line["error"]) for line in said] == [("expiry", "the skew is not known")]


@pytest.mark.parametrize("is_down", [True, False])
async def test_an_outage_of_the_store_has_no_lines_by_partition(
    running: Running, store: Store, caplog: pytest.LogCaptureFixture, is_down: bool
) -> None:
    """A store that refuses one object alone answers other calls: then the failures are logged, but the first ones."""
    outage = StoreOutage("", lambda: BEGINS_AFTER_MS if outage.reason else 0)
    services = replace(running.bench.services, outages=StoreOutages([outage]))
    if is_down:
        for _ in range(2):
            outage.failed(RetriableRemoteStorageError("503 Slow Down"))
    settings = replace(services.settings, stage_alarm_ms=1, copy_stall_alarm_ms=300)
    running.manager = RemoteLogManager(replace(services, settings=settings), running.topics)
    store.refused = {"copy_log_segment_data", "put_object"}
    async with running.run():
        await until(lambda: running.bench.active("stage-failing") >= 1 and failures(running, "copy") >= 8)
        await until(lambda: running.bench.active("copy-stalled") >= 1)
        alarms = running.manager.alarms()
        assert {each.waits_for for each in alarms} == {Peer.STORE}
        assert running.manager.copies_waiting()[Peer.STORE] >= 1
    said = [line.getMessage() for line in caplog.records if line.levelname in ("WARNING", "ERROR")]
    of_partitions = {
        "a stage of a partition failed",
        "a stage of a partition keeps failing",
        "copying makes no progress",
    }
    assert of_partitions.intersection(said) == (set() if is_down else of_partitions)
    logged = [vars(line)["failures"] for line in caplog.records if line.getMessage() == "a stage of a partition failed"]
    assert all(each >= 4 for each in logged)


async def test_a_copy_in_progress_ends_before_the_tier_is_cut(running: Running, store: Store, bench: Workbench) -> None:
    """A segment of the earlier history that is finished after the CUT would leave a hole below it."""
    log = running.logs.of[PARTITION]
    async with running.run():
        await until(lambda: running.remote_end(PARTITION) == 89)
        store.hanging = {"copy_log_segment_data"}
        store.asked.clear()
        running.produce(100, 200)
        await until(lambda: "copy_log_segment_data" in store.asked)
        log.elect_unclean(80)
        log.append(*batches(80, 150, leader_epoch=1))
        await until(lambda: bench.metric("remote_log_alarms_total", topic="orders", reason="cut") == 1)
        store.hanging.clear()
        await until(lambda: running.remote_end(PARTITION) == 139)
    offset = 0
    while (segment := bench.state.remote_log_segment_metadata(PARTITION, offset)) is not None:
        offset = segment.valid_end_offset + 1
    assert offset == 140


async def test_a_copy_that_ends_during_the_comparison_does_not_expire_yet(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records may be those of an earlier leader. Its end must not trim the records of the present one.

    The earlier leader has answered the question that the owner asked before the copy counts."""
    log, policy = bench.log, replace(POLICY, retention_ms=60_000)
    log.append(*batches(0, 70))
    settings = replace(bench.services.settings, segments_per_run=2)  # no read of a third one follows the copy
    tasks = PartitionTasks(replace(bench.services, settings=settings), PARTITION, policy, Tenure(0, 0))
    write, ask = bench.metadata.update_remote_log_segment_metadata, log.end_offset_for_epoch
    uploaded, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(update: RemoteLogSegmentMetadataUpdate) -> None:
        if bench.finished:
            uploaded.set()
            await go_on.wait()
        await write(update)

    async def answer_late(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        answer = await ask(partition, leader_epoch, timeout_ms)
        go_on.set()
        await until(lambda: bench.finished == [(0, 29), (30, 59)])
        return answer

    monkeypatch.setattr(bench.metadata, "update_remote_log_segment_metadata", slowly)
    async with asyncio.TaskGroup() as group:
        surveyed = await tasks.round()
        assert surveyed is not None
        tasks.running["copy"] = group.create_task(tasks.run_copy(surveyed))
        await uploaded.wait()
        assert bench.finished == [(0, 29)]
        log.elect_unclean(50)
        log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms, leader_epoch=1) for n in (5, 6)])
        monkeypatch.setattr(log, "end_offset_for_epoch", answer_late)
        bench.now_ms += bench.services.settings.remote_log.task_interval_ms
        await tasks.round()
        assert log.log_start_offset == 30
    monkeypatch.setattr(log, "end_offset_for_epoch", ask)
    bench.now_ms += bench.services.settings.remote_log.task_interval_ms
    await tasks.round()
    assert [each.cut_at for each in bench.segments if each.start_offset == 30] == [50]
    assert log.log_start_offset == 50


async def test_a_copy_in_progress_is_no_leftover_when_the_log_start_passes_it(
    running: Running, store: Store, bench: Workbench
) -> None:
    async with running.run():
        await until(lambda: running.remote_end(PARTITION) == 89)
        store.hanging = {"copy_log_segment_data"}
        store.asked.clear()
        running.produce(100, 200)
        await until(lambda: "copy_log_segment_data" in store.asked)
        attempt = running.manager._managed[PARTITION].attempts.in_progress
        await bench.metadata.put_log_start(PARTITION, LogStart(180, 0, LogStartReason.USER))
        await until(lambda: remote_start(running) is None)
        known = bench.state.remote_log_segment_metadata_by_id(attempt) if attempt else None
        assert known is not None
        assert known.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED
        store.hanging.clear()
        await until(lambda: bench.segments == [])


def restart_with_one_place(running: Running) -> None:
    services = running.bench.services
    remote_log = services.settings.remote_log.model_copy(update={"manager_threads": 1})
    settings = replace(services.settings, remote_log=remote_log)
    running.manager = RemoteLogManager(replace(services, settings=settings), running.topics)


async def test_kept_records_are_announced_after_the_store_is_listed(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata of the partition is lost, and the spool is not. Its first record makes clients go on."""
    bench.log.append(*batches(0, 100))
    bench.log.log_start_offset = 30
    bench.end_after = "segment-kept"
    with pytest.raises(ProcessEnded):
        await bench.copy()
    bench.end_after = ""
    bench.metadata.all_log_starts.clear()
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 0))

    def refused(prefix: str) -> AsyncIterator[StoredObject]:
        raise RetriableRemoteStorageError("503")

    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "list_objects", refused)
        await tasks.round()
    assert not bench.state.is_known(PARTITION)
    bench.now_ms += 60_000
    await tasks.round()
    assert [each.start_offset for each in bench.segments] == [30]
