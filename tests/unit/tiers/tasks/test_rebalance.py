"""`RemoteLogManager` over a rebalance: the work in progress waits for the new assignment, and nothing else happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.tiers.attempts import batches
from tests.support.tiers.running_manager import OTHER, Running
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.metadata.metadata_log import begun_in
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import LogSegmentData


@pytest.fixture
def running(bench: Workbench) -> Running:
    running = Running(bench, replace(POLICY, local_retention_bytes=0))
    running.produce(0, 100)
    return running


def is_quiet(running: Running) -> bool:
    return all(not each.running for each in running.manager._managed.values())


async def rounds_of_the_manager(running: Running) -> None:
    """The manager looks at the ownership, several times."""
    seen = running.topics.refreshes
    await until(lambda: running.topics.refreshes > seen + 2)


async def test_an_upload_in_progress_goes_on_over_a_rebalance(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, copying, go_on = running.bench.store.copy_log_segment_data, asyncio.Event(), asyncio.Event()
    uploads: list[int] = []

    async def slowly(metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        if metadata.topic_id_partition == PARTITION:
            uploads.append(metadata.start_offset)
            copying.set()
            await go_on.wait()
        assert begun_in(0) == running.bench.metadata.log.tenure(metadata.topic_id_partition)
        return await copy(metadata, data)

    monkeypatch.setattr(running.bench.store, "copy_log_segment_data", slowly)
    async with running.run():
        await copying.wait()
        running.bench.metadata.owned, running.bench.metadata.is_awaiting = False, True
        await rounds_of_the_manager(running)
        running.bench.metadata.owned = True
        go_on.set()
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89])
    assert uploads == [0, 30, 60], "no segment is copied twice"


async def test_nothing_begins_while_the_ownership_is_awaited(running: Running) -> None:
    log = running.logs.of[PARTITION]
    async with running.run():
        await until(lambda: [running.remote_end(each) for each in (PARTITION, OTHER)] == [89, 89])
        await until(lambda: log.log_start_offset == 60)
        managed = running.manager._managed[PARTITION]
        await until(lambda: is_quiet(running) and bool(managed.copy.uncopied.size_bytes))
        running.bench.metadata.owned, running.bench.metadata.is_awaiting = False, True
        await until(lambda: is_quiet(running))
        written = running.bench.metadata.written
        log.append(*batches(100, 200))
        await rounds_of_the_manager(running)
        assert is_quiet(running)
        assert (running.bench.metadata.written, log.log_start_offset) == (written, 60)
        running.bench.metadata.owned = True
        await until(lambda: running.remote_end(PARTITION) == 179)
        assert running.manager._managed[PARTITION] is managed


async def test_work_of_an_earlier_tenure_is_dropped(running: Running) -> None:
    """Another owner may have written in between, though this process owns the partition again."""
    async with running.run():
        await until(lambda: running.remote_end(PARTITION) == 89)
        managed = running.manager._managed[PARTITION]
        await until(lambda: is_quiet(running) and bool(managed.copy.uncopied.size_bytes))
        running.bench.metadata.tenures += 1
        await until(lambda: running.manager._managed.get(PARTITION) not in (None, managed))
        running.logs.of[PARTITION].append(*batches(100, 200))
        await until(lambda: running.remote_end(PARTITION) == 179)
