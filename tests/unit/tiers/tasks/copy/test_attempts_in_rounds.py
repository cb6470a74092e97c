"""Attempts that other copies, CUTs, an acceptance or another member's spool could end: no last copy goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.tier_process import PARTITION, POLICY, Clock, OneTopic, TierProcess
from tests.support.tiers.attempts import batches, begun, copied, planned, whole_rounds
from tests.support.tiers.segment_metadata import to
from tests.support.tiers.workbench import ProcessEnded, Workbench
from tiers.errors import (
    RemoteLogError,
    RemoteLogMetadataNotReadyError,
    RemoteResourceNotFoundError,
    RetriableRemoteStorageError,
)
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.tenure import Tenure
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.segment_encryption import KeyRing
from tiers.tasks.partition_tasks import PartitionTasks

FINISHED = RemoteLogSegmentState.COPY_SEGMENT_FINISHED
Announce = Callable[[Workbench, int, int], Awaitable[RemoteLogSegmentMetadata]]
announced = pytest.mark.parametrize("announce", [begun, planned], ids=["by-an-owner", "by-a-job"])


@pytest.fixture
async def log(bench: Workbench) -> Workbench:
    """The leader has 0 to 99, and 0 to 29 are copied."""
    bench.log.append(*batches(0, 100))
    await copied(bench, 0, 30)
    await bench.check_facts()
    return bench


def owner(bench: Workbench) -> PartitionTasks:
    return PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))


def unread(bench: Workbench, first: int, end: int) -> list[int]:
    known = bench.state.remote_log_segment_metadata
    return [offset for offset in range(first, end) if known(PARTITION, offset) is None]


@announced
async def test_a_whole_attempt_is_readable_up_to_the_cut(log: Workbench, announce: Announce) -> None:
    """The broker has removed 30 to 39. After an unclean election, the leader has other records from 50 on."""
    await announce(log, 30, 60)
    log.log.elect_unclean(50)
    log.log.log_start_offset = 40
    log.log.append(*batches(50, 200, leader_epoch=1))
    await whole_rounds(log, owner(log), 20)
    assert (unread(log, 30, 50), log.metadata.state.gaps(PARTITION)) == ([], [])


@announced
async def test_a_leader_without_the_records_ends_no_refusal(log: Workbench, announce: Announce) -> None:
    """A leader has other records from 40 on. Copying is disabled until retention has removed them."""
    await announce(log, 30, 60)
    log.log.elect_unclean(40)
    log.log.append(*batches(40, 200, leader_epoch=1))
    tasks = PartitionTasks(log.services, PARTITION, replace(POLICY, copy_disable=True), Tenure(0, 1))
    await whole_rounds(log, tasks, 5)
    log.log.log_start_offset = 100
    await whole_rounds(log, tasks, 20)
    assert log.metadata.state.remote_log_segment_metadata(PARTITION, 50) is None


async def test_a_whole_attempt_above_a_cut_stays(log: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses to return the attempt until other copies have its offsets."""
    attempt, tasks, fetch_indexes = await begun(log, 30, 60), owner(log), log.store.fetch_indexes
    log.log.elect_unclean(30)
    log.log.append(*batches(30, 200, leader_epoch=1))

    async def refuse(segment: RemoteLogSegmentMetadata) -> bytes:
        if segment.segment_id == attempt.segment_id:
            raise RetriableRemoteStorageError("503")
        return await fetch_indexes(segment)

    with monkeypatch.context() as failing:
        failing.setattr(log.store, "fetch_indexes", refuse)
        await whole_rounds(log, tasks, 5)
    assert unread(log, 30, 60) == []
    await whole_rounds(log, tasks, 10)
    [known] = [each for each in log.segments if each.segment_id == attempt.segment_id]
    assert (known.state, known.is_cut_off) == (FINISHED, True)
    assert await log.store.fetch_indexes(attempt)


async def test_an_attempt_above_a_cut_that_is_not_whole_is_deleted(log: Workbench) -> None:
    attempt = await begun(log, 30, 60)
    await log.store.delete_log_segment_data(attempt)
    log.log.elect_unclean(30)
    log.log.append(*batches(30, 200, leader_epoch=1))
    await whole_rounds(log, owner(log), 10)
    assert attempt.segment_id not in log.metadata.segments


async def test_an_acceptance_deletes_no_last_copy(log: Workbench) -> None:
    """A job merged 0 to 59, and the owner deleted the parts. The metadata topic loses the end and the deletions."""
    await copied(log, 30, 60)
    parts, merged = list(log.segments), await begun(log, 0, 60)
    await log.metadata.update_remote_log_segment_metadata(to(merged, FINISHED))
    earlier = owner(log)
    await whole_rounds(log, earlier, 5)
    await earlier.facts.store()
    with pytest.raises(RemoteResourceNotFoundError):
        await log.store.fetch_indexes(parts[0])
    log.log.log_start_offset = 90
    log.metadata = InMemoryRemoteLogMetadataManager(lambda: log.now_ms, lambda: log.wall_ms)
    log.services = replace(log.services, metadata=log.metadata)
    for part in parts:
        await log.metadata.add_remote_log_segment_metadata(
            replace(part, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
        )
        await log.metadata.update_remote_log_segment_metadata(to(part, FINISHED))
    await log.metadata.add_remote_log_segment_metadata(merged)
    log.restart()
    tasks = owner(log)
    await whole_rounds(log, tasks, 4)
    assert tasks.doubt
    await log.accept()
    await whole_rounds(log, tasks, 6)
    assert await log.store.fetch_indexes(merged)


@pytest.mark.parametrize("trouble", ["the disk has damaged it", "the key is gone"])
async def test_one_kept_segment_holds_up_no_other_one(log: Workbench, trouble: str) -> None:
    """Another owner has deleted the attempt of a kept segment, and has recorded a gap. Then its process is back."""
    log.services = replace(log.services, key_ring=KeyRing({"k1": b"1" * 32, "k2": b"2" * 32}, current="k1"))
    log.restart()
    log.end_after = "copy-started-written"
    with pytest.raises(ProcessEnded):
        await log.copy()
    log.end_after = ""
    if trouble == "the key is gone":
        log.services = replace(log.services, key_ring=KeyRing({"k2": b"2" * 32}, current="k2"))
    else:
        [path] = [each for each in log.spooled() if each.suffix == ".log"]
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    log.restart()
    await log.services.spool.open()
    [attempt] = [one for one in log.segments if one.start_offset == 30]
    for state in (RemoteLogSegmentState.DELETE_SEGMENT_STARTED, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED):
        await log.services.write_state(attempt, state)
    await log.metadata.put_log_gap(PARTITION, LogGap(30, 60), 0)
    log.log.log_start_offset = 60
    await whole_rounds(log, owner(log), 5)
    assert log.finished == [(0, 29), (60, 89), (90, 99)]
    assert len(log.spooled()) == (2 if trouble == "the key is gone" else 0)


@pytest.mark.parametrize("first", [0, 30], ids=["first-segment", "later-segment"])
@pytest.mark.parametrize("is_announced", [True, False])
async def test_another_member_keeps_and_stores_what_its_spool_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, is_announced: bool
) -> None:
    """Process a loses the ownership before it could announce or store a segment. The broker removes the records.

    It stores an announced segment for the present owner. It announces one when it owns the partition again."""
    (tmp_path / "remote").mkdir()
    clock, log, topics = Clock(), InMemoryLog(), OneTopic(POLICY)
    topic = FakeMetadataTopic(lambda: clock.wall_ms, owner="a")
    a, b = (TierProcess(name, tmp_path, log, topic, topics, clock) for name in "ab")

    def produce(offset: int, end: int) -> None:
        log.append(*(batch_of(at, 10, value_bytes=15) for at in range(offset, end, 10)))

    async def rounds(process: TierProcess, count: int) -> None:
        for _ in range(count):
            with suppress(RemoteLogError):
                await process.manager.round()
            clock.advance(POLICY.segment_ms)

    async def refused(*_: object) -> None:
        raise RemoteLogMetadataNotReadyError("NOT_ENOUGH_REPLICAS")

    async def down(*_: object) -> None:
        raise RetriableRemoteStorageError("503")

    await a.open()
    await b.open()
    produce(0, first)
    await rounds(a, 3)
    produce(first, first + 30)
    with monkeypatch.context() as failing:
        if is_announced:
            failing.setattr(a.store, "copy_log_segment_data", down)
        else:
            failing.setattr(a.metadata, "add_remote_log_segment_metadata", refused)
        await rounds(a, 3)
    assert len(a.spooled()) == 2
    topic.owner = "b"
    produce(first + 30, 200)
    log.log_start_offset = first + 60
    await rounds(b, 1)
    await a.store_kept()
    await rounds(b, 5)
    if not is_announced:
        await b.metadata.put_log_start(PARTITION, user_log_start(1_000, leader_epoch=7))
        await a.store_kept()
        assert len(a.spooled()) == 2, "the leader denies the log start"
        topic.owner = "a"
        await rounds(a, 5)
    await a.store_kept()
    metadata = b.metadata if is_announced else a.metadata
    assert metadata.state.remote_log_segment_metadata(PARTITION, first + 29) is not None
    assert RemoteLog(metadata.state, PARTITION).earliest(first + 60) == 0
    assert a.spooled() == []
    await a.end()
    await b.end()
