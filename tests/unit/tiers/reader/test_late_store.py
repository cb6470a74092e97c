"""A store that shows a FINISHED segment late: the read waits, and never answers that the segment is gone.

See docs/design.md, safety rule 7.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fakes.remote_requests import P0, asked, joined
from tests.support.fakes.remote_tier import RemoteTier
from tests.support.tiers.waiting import until
from tiers.config.settings import RemoteLogConfig
from tiers.errors import RemoteReadTimeoutError, RemoteResourceNotFoundError
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteLogReaderSettings, monotonic_ms


@pytest.mark.parametrize("suffix", [".log", ".indexes"])
async def test_a_late_object_is_read_when_the_store_shows_it(tmp_path: Path, suffix: str) -> None:
    tier = RemoteTier(tmp_path)
    batches = await tier.fill(P0, segments=1, batches=1)
    (shown,) = (tmp_path / "store").rglob(f"*{suffix}")
    hidden = shown.rename(tmp_path / "hidden")
    settings = RemoteLogReaderSettings(remote_log=RemoteLogConfig(chunk_cache_bytes=1 << 20))
    passed_ms = 0

    def asked_for() -> int:
        return len(tier.storage.gets) + tier.storage.index_gets

    def clock_ms() -> int:
        return monotonic_ms() + passed_ms

    async def time_passes() -> None:
        nonlocal passed_ms
        await until(lambda: max(len(tier.storage.gets), tier.storage.index_gets) >= 2)
        passed_ms = 600_000

    async with RemoteLogReader(tier.rlmm.log, tier.storage, settings, clock_ms=clock_ms, jitter=lambda: 0.0) as reader:
        with pytest.raises(RemoteReadTimeoutError) as raised:
            await asyncio.gather(reader.read(asked(0, deadline_ms=clock_ms() + 600_000)), time_passes())
        assert isinstance(raised.value.cause, RemoteResourceNotFoundError)
        assert raised.value.retriable
        before = asked_for()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(reader.read(asked(0, deadline_ms=clock_ms() + 60_000)))
            await until(lambda: asked_for() > before + 1)
            hidden.rename(shown)
        assert joined(reading.result()) == batches[0]
