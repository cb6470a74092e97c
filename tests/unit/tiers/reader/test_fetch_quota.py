"""Fetch quotas (KIP-956): a read above its quota returns nothing and no error, and sends no request to the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.remote_requests import P0, asked
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.errors import CorruptSegmentError, OffsetBelowLogStartError
from tiers.model.ids import TopicIdPartition
from tiers.quota import QuotaWindow, RemoteFetchQuotas
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteLogReaderSettings, RemoteRead

NAMELESS = TopicIdPartition(TOPIC_ID, 0)
"""As a Fetch by topic id names it."""


async def read(reader: RemoteLogReader, client_id: str, offset: int = 0, isolation_level: int = 1) -> RemoteRead:
    return await reader.read(asked(offset, partition=NAMELESS, isolation_level=isolation_level, client_id=client_id))


@pytest.mark.parametrize("limit", ["bytes_per_second", "per_client", "per_topic"])
async def test_above_a_quota_a_read_is_empty_until_the_window_has_passed(tmp_path: Path, limit: str) -> None:
    tier = RemoteTier(tmp_path)
    await tier.fill(P0, segments=1, batches=20)
    now_ms = 1_000_000
    value = {"per_topic": [("orders", 1000)]} if limit == "per_topic" else {limit: 1000}
    quotas = RemoteFetchQuotas(lambda: now_ms, window=QuotaWindow(1, 1000), **value)
    async with RemoteLogReader(tier.rlmm.log, tier.storage, RemoteLogReaderSettings(), quotas=quotas) as reader:
        first = await read(reader, "a")
        assert first.size_bytes > 1000
        gets = len(tier.storage.gets)
        for isolation_level, aborted in ((0, None), (1, ())):
            empty = await read(reader, "a", 57, isolation_level)
            assert empty == RemoteRead([], 0, 57, 57, aborted)
        assert len(tier.storage.gets) == gets
        assert bool((await read(reader, "b")).records) == (limit == "per_client")
        now_ms += 2000
        assert (await read(reader, "a")).size_bytes == first.size_bytes
    assert quotas.throttled_count >= 2


async def test_an_offset_that_is_not_remote_is_reported_above_the_quota_too(tmp_path: Path) -> None:
    tier = RemoteTier(tmp_path)
    await tier.fill(P0, segments=1, batches=20)
    await tier.rlmm.put_log_start(P0, user_log_start(50))
    quotas = RemoteFetchQuotas(lambda: 0, bytes_per_second=1)
    assert quotas.reserve("orders", "a", 1 << 30) is not None
    async with RemoteLogReader(tier.rlmm.log, tier.storage, RemoteLogReaderSettings(), quotas=quotas) as reader:
        with pytest.raises(OffsetBelowLogStartError):
            await read(reader, "a", 10)
        assert not (await read(reader, "a", 60)).records


async def test_a_read_that_fails_uses_nothing_up(tmp_path: Path) -> None:
    tier = RemoteTier(tmp_path)
    await tier.fill(P0, segments=1, batches=20)
    quotas = RemoteFetchQuotas(lambda: 0, window=QuotaWindow(1, 1000), bytes_per_second=1000)
    async with RemoteLogReader(tier.rlmm.log, tier.storage, RemoteLogReaderSettings(), quotas=quotas) as reader:
        tier.storage.damage = lambda data: b""
        for _ in range(3):
            with pytest.raises(CorruptSegmentError):
                await read(reader, "a")
        tier.storage.damage = None
        assert (await read(reader, "a")).records
