"""A process that stood still while another one took its partition over believes nothing that it still knows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.in_memory_log import InMemoryLog
from tests.fakes.io_calls import Event
from tests.fakes.metadata_log import MetadataLog
from tests.fakes.tier_oracle import TierOracle
from tests.fakes.tier_process import PARTITION, POLICY, VISIBLE_AFTER_MS, Clock, OneTopic, TierProcess
from tiers.errors import OwnershipLostError

KEEP_NOTHING = replace(POLICY, local_retention_bytes=0)


@pytest.mark.parametrize("cluster_id", ["", "cluster"], ids=["without a manifest", "with a manifest"])
@pytest.mark.parametrize("call", ["metadata.ensure_fresh", "broker.bounds"])
async def test_what_another_owner_trimmed_is_no_hole(call: str, cluster_id: str, tmp_path: Path) -> None:
    """Nor is what it copied lost metadata, though the manifest names it."""
    (tmp_path / "remote").mkdir()
    clock, log, model = Clock(), InMemoryLog(), TierOracle()
    metadata_log = MetadataLog(lambda: clock.wall_ms, owner="a")
    topics = OneTopic(KEEP_NOTHING)
    processes = {
        name: TierProcess(name, tmp_path, log, metadata_log, topics, clock, cluster_id=cluster_id)
        for name in ("a", "b")
    }
    a, b = processes.values()
    try:
        for process in processes.values():
            await process.open()
        a.calls.arm(0 if call == "metadata.ensure_fresh" else 1, Event.FROZEN_AFTER)
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
        assert b.metadata.log_start_offset(PARTITION) == 0
        async with b.reader() as reader:
            await model.read_all(reader, 0, log.log_start_offset)
    finally:
        for process in processes.values():
            await process.end()


async def refused(process: TierProcess) -> None:
    with pytest.raises(OwnershipLostError):
        await process.manager.round()
