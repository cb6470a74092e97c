"""Attempts that other copies, CUTs, an acceptance or another member's spool could end: no last copy goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.support.fakes.tier_process import PARTITION, POLICY
from tests.support.tiers.attempts import batches, begun, copied, planned, whole_rounds
from tests.support.tiers.workbench import ProcessEnded, Workbench
from tiers.errors import (
    RetriableRemoteStorageError,
)
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
