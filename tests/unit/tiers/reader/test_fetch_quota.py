"""Fetch quotas (KIP-956): a read above its quota returns nothing and no error, and sends no request to the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.remote_requests import P0, asked
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.errors import CorruptSegmentError, OffsetBelowLogStartError
from tiers.model.ids import TopicIdPartition
from tiers.quota import QuotaWindow, RemoteFetchQuotas
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteRead

NAMELESS = TopicIdPartition(TOPIC_ID, 0)
"""As a Fetch by topic id names it."""


class Quoted(RemoteLogReader):
    def __init__(self, tier: RemoteTier) -> None:
        self.now_ms = 1_000_000
        super().__init__(tier.rlmm.log, tier.storage)

    def limit(self, **limits: object) -> None:
        self.quotas = RemoteFetchQuotas(lambda: self.now_ms)
        self.quotas.change(QuotaWindow(1, 1000), **limits)  # type: ignore[arg-type]  # one of the limits

    async def ask(self, client_id: str, offset: int = 0, isolation_level: int = 1) -> RemoteRead:
        request = asked(offset, partition=NAMELESS, isolation_level=isolation_level, client_id=client_id)
        return await self.read(request)


@pytest.fixture
async def tier(tmp_path: Path) -> RemoteTier:
    made = RemoteTier(tmp_path)
    await made.fill(P0, segments=1, batches=20)
    return made


@pytest.fixture
async def reader(tier: RemoteTier) -> AsyncIterator[Quoted]:
    async with Quoted(tier) as made:
        yield made


@pytest.mark.parametrize("limit", ["bytes_per_second", "per_client", "per_topic"])
async def test_above_a_quota_a_read_is_empty_until_the_window_has_passed(
    tier: RemoteTier, reader: Quoted, limit: str
) -> None:
    reader.limit(**{limit: [("orders", 1000)] if limit == "per_topic" else 1000})
    first = await reader.ask("a")
    assert first.size_bytes > 1000
    gets = len(tier.storage.gets)
    for isolation_level, aborted in ((0, None), (1, ())):
        assert await reader.ask("a", 57, isolation_level) == RemoteRead([], 0, 57, 57, aborted)
    assert len(tier.storage.gets) == gets
    assert bool((await reader.ask("b")).records) == (limit == "per_client")
    reader.now_ms += 2000
    assert (await reader.ask("a")).size_bytes == first.size_bytes
    assert reader.quotas.throttled_count >= 2


async def test_an_offset_that_is_not_remote_is_reported_above_the_quota_too(tier: RemoteTier, reader: Quoted) -> None:
    await tier.rlmm.put_log_start(P0, user_log_start(50))
    reader.limit(bytes_per_second=1)
    assert reader.quotas.reserve("orders", "a", 1 << 30) is not None
    with pytest.raises(OffsetBelowLogStartError):
        await reader.ask("a", 10)
    assert not (await reader.ask("a", 60)).records


async def test_a_read_that_fails_uses_nothing_up(tier: RemoteTier, reader: Quoted) -> None:
    reader.limit(bytes_per_second=1000)
    tier.storage.damage = lambda data: b""
    for _ in range(3):
        with pytest.raises(CorruptSegmentError):
            await reader.ask("a")
    tier.storage.damage = None
    assert (await reader.ask("a")).records
