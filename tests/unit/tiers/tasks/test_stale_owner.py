"""A paused process whose partition another one took over acts on none of its old knowledge."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.io_calls import Event
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.fakes.tier_process import PARTITION, POLICY, VISIBLE_AFTER_MS, Clock, OneTopic, TierProcess
from tests.support.tiers.workbench import PARTITION as ON_BENCH
from tests.support.tiers.workbench import Workbench
from tests.support.written_log import WrittenLog
from tiers.errors import OwnershipLostError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.tasks.deletion.segment_deletion import delete_attempts

KEEP_NOTHING = replace(POLICY, local_retention_bytes=0)


@pytest.mark.parametrize("call", ["metadata.ensure_fresh", "broker.bounds"])
async def test_a_trim_of_another_owner_is_no_gap(call: str, tmp_path: Path) -> None:
    """Nor is what it copied lost metadata, though the stored facts name its position."""
    (tmp_path / "remote").mkdir()
    clock, log, model = Clock(), InMemoryLog(), WrittenLog()
    metadata_log = FakeMetadataTopic(lambda: clock.wall_ms, owner="a")
    topics = OneTopic(KEEP_NOTHING)
    processes = {name: TierProcess(name, tmp_path, log, metadata_log, topics, clock) for name in ("a", "b")}
    a, b = processes.values()
    try:
        for process in processes.values():
            await process.open()
        a.calls.arm(0 if call == "metadata.ensure_fresh" else 2, Event.FROZEN_AFTER)
        async with asyncio.TaskGroup() as tasks:
            standing = tasks.create_task(refused(a))
            await a.calls.frozen.wait()
            assert a.calls.names[-1] == call

            metadata_log.owner = "b"
            for _ in range(12):
                log.append(model.append(10, clock.wall_ms))
            for _ in range(3):
                await b.manager.round()
                clock.advance(VISIBLE_AFTER_MS)
            assert log.log_start_offset > 0

            a.calls.thawed.set()
            await standing
        b.metadata.follow()
        assert b.metadata.state.log_start_offset(PARTITION) == 0
        async with b.reader() as reader:
            await model.read_all(reader, 0, log.log_start_offset)
    finally:
        for process in processes.values():
            await process.end()


async def refused(process: TierProcess) -> None:
    with pytest.raises(OwnershipLostError):
        await process.manager.round()


async def test_a_copy_that_another_owner_finished_is_no_leftover(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ownership was lost and regained while the store took its time with the first."""
    begun = []
    for start in (0, 10, 20):
        built = build_segment(tmp_path / str(start), [batch_of(start, 10)], base_offset=start)
        segment = metadata_of(built, ON_BENCH)
        await bench.metadata.add_remote_log_segment_metadata(segment)
        await bench.store.copy_log_segment_data(segment, built.log_segment_data(segment))
        begun.append(segment)
    delete = bench.store.delete_log_segment_data

    async def slowly(segment: RemoteLogSegmentMetadata) -> bool:
        monkeypatch.undo()
        first, second = (one for one in begun if one.segment_id != segment.segment_id)
        await bench.services.write_state(first, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
        await bench.services.write_state(second, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
        await bench.services.write_state(second, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED)
        return await delete(segment)

    monkeypatch.setattr(bench.store, "delete_log_segment_data", slowly)
    assert await delete_attempts(bench.services, ON_BENCH, begun) == 1
    [left] = bench.segments
    assert left.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    assert await bench.remote_bytes() == batch_of(left.start_offset, 10)
