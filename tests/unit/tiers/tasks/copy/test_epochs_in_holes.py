"""A log that was compacted once: an offset in a hole has the leader epoch that the leader gives it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.metadata.log_history import confirms_log_start, epoch_before
from tiers.metadata.remote_log import RemoteLog
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.verify.segment_verification import verify_segment

AT_ONCE = replace(POLICY, segment_ms=0)


@pytest.fixture
def log(bench: Workbench) -> InMemoryLog:
    """Epoch 5 began at 150. A compaction has removed the records 10 to 199 of both epochs."""
    bench.log.leader_epoch, bench.log.elections = 5, {3: 0, 5: 150}
    bench.log.append(batch_of(0, 10, leader_epoch=3), batch_of(200, 10, leader_epoch=5))
    return bench.log


def epochs_of(segment: RemoteLogSegmentMetadata) -> list[tuple[int, int]]:
    return [(one.epoch, one.start_offset) for one in segment.segment_leader_epochs]


async def test_the_tier_and_the_leader_agree_on_every_offset(bench: Workbench, log: InMemoryLog) -> None:
    await bench.copy(AT_ONCE)
    [segment] = bench.segments
    assert epochs_of(segment) == [(3, 0), (5, 150)]
    for offset in range(1, 210):
        of_leader = await epoch_before(log, PARTITION, offset, 5, 1000)
        assert RemoteLog(bench.state, PARTITION).epoch_at(offset - 1) == of_leader
    assert await verify_segment(bench.store, segment, None) == []


async def test_a_segment_that_begins_in_a_hole_has_the_epochs_of_the_hole(bench: Workbench, log: InMemoryLog) -> None:
    log.elections[4] = 120
    log.last_stable_offset = 10
    await bench.copy(AT_ONCE)
    bench.restart()
    log.last_stable_offset = None
    await bench.copy(AT_ONCE)
    first, second = bench.segments
    assert (epochs_of(first), epochs_of(second)) == ([(3, 0)], [(3, 10), (4, 120), (5, 150)])
    cumulative = decode_indexes_object(await bench.store.fetch_indexes(second), second).indexes.leader_epochs
    assert [(one.epoch, one.start_offset) for one in cumulative] == [(3, 0), (4, 120), (5, 150)]


async def test_a_deletion_during_a_copy_cuts_off_no_record(
    bench: Workbench, log: InMemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append(batch_of(210, 10, leader_epoch=5))
    copy: Callable[[RemoteLogSegmentMetadata, LogSegmentData], Awaitable[bytes | None]]
    copy = bench.store.copy_log_segment_data

    async def copy_while_a_user_deletes(metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        if not log.log_start_offset:
            # The record before 200 is not remote, so the proxy asks the leader for its epoch.
            last_epoch = await epoch_before(log, PARTITION, 200, 5, 1000)
            log.log_start_offset = 200
            await bench.metadata.put_log_start(PARTITION, LogStart(200, 5, LogStartReason.USER, last_epoch))
        return await copy(metadata, data)

    monkeypatch.setattr(bench.store, "copy_log_segment_data", copy_while_a_user_deletes)
    await bench.copy(AT_ONCE)
    assert bench.state.log_start_offset(PARTITION) == 200
    # The broker's own retention removes the copied records.
    log.log_start_offset = 220
    log.append(batch_of(220, 10, leader_epoch=5))
    for _ in range(3):
        await bench.check_facts()
        await bench.copy(AT_ONCE)
    assert {segment.cut_at for segment in bench.segments} == {None}
    assert bench.state.remote_log_segment_metadata(PARTITION, 205) is not None


async def test_a_log_start_in_a_hole_is_confirmed_by_a_leader_that_lost_it(bench: Workbench, log: InMemoryLog) -> None:
    await bench.copy(AT_ONCE)
    last_epoch = RemoteLog(bench.state, PARTITION).epoch_at(199)
    start = LogStart(200, 5, LogStartReason.USER, last_epoch)
    log.log_start_offset = 200
    assert await confirms_log_start(log, PARTITION, start, 1000)
    log.log_start_offset = 0  # an unclean stop before the checkpoint of the log start
    assert await confirms_log_start(log, PARTITION, start, 1000)
