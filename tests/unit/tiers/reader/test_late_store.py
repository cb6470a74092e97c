"""A store that shows a FINISHED segment late: the read waits, and never answers that the segment is gone.

See docs/design.md, safety rule 7.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.config.settings import RemoteLogConfig
from tiers.errors import RemoteReadTimeoutError, RemoteResourceNotFoundError
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import (
    RemoteLogReader,
    RemoteLogReaderSettings,
    RemoteRead,
    RemoteReadRequest,
    monotonic_ms,
)

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")


async def read(reader: RemoteLogReader, deadline_ms: int) -> RemoteRead:
    return await reader.read(
        RemoteReadRequest(
            P0,
            0,
            100_000,
            min_one_message=True,
            isolation_level=0,
            deadline_ms=deadline_ms,
            connection_id=1,
        )
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # what the reader asks the store sets no event each time
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("suffix", [".log", ".indexes"])
async def test_a_late_object_is_read_when_the_store_shows_it(tmp_path: Path, suffix: str) -> None:
    tier = RemoteTier(tmp_path)
    batches = await tier.fill(P0, segments=1, batches=1)
    (shown,) = (tmp_path / "store").rglob(f"*{suffix}")
    hidden = shown.rename(tmp_path / "hidden")
    settings = RemoteLogReaderSettings(remote_log=RemoteLogConfig(chunk_cache_bytes=1 << 20))
    passed_ms = 0

    def clock_ms() -> int:
        return monotonic_ms() + passed_ms

    async def time_passes() -> None:
        nonlocal passed_ms
        await until(lambda: max(len(tier.storage.gets), tier.storage.index_gets) >= 2)
        passed_ms = 600_000

    async with RemoteLogReader(tier.rlmm, tier.storage, settings, clock_ms=clock_ms, jitter=lambda: 0.0) as reader:
        with pytest.raises(RemoteReadTimeoutError) as raised:
            await asyncio.gather(read(reader, clock_ms() + 600_000), time_passes())
        assert isinstance(raised.value.cause, RemoteResourceNotFoundError)
        assert raised.value.retriable
        asked = len(tier.storage.gets) + tier.storage.index_gets
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read(reader, clock_ms() + 60_000))
            await until(lambda: len(tier.storage.gets) + tier.storage.index_gets > asked + 1)
            hidden.rename(shown)
        assert bytes(reading.result().records[0]) == batches[0]
