"""While an operator pauses the reading of a topic, a client waits: it neither skips nor jumps, and the store rests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from proxy.handlers.base import FetchSettings
from tests.support.fakes.fetch_bench import Bench, ask, ask_local, bench_of, codes, records
from tests.support.fakes.remote_tier import TOPIC_ID
from tests.support.proxy import list_offsets_bench
from tests.support.proxy.list_offsets_bench import EARLIEST, LATEST, LATEST_TIERED, MAX, found
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import TierWork

VERSION = 13


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=50))) as made:
        yield made


async def pause(bench: Bench, value: str | None = "true") -> None:
    await bench.tier.rlmm.change_topic_tier_config(TOPIC_ID, "orders", {TierWork.READING.key: value})


async def test_remote_offsets_alone_are_unavailable(bench: Bench) -> None:
    """An offset that does not exist is still out of range."""
    await pause(bench)
    for _ in range(3):
        assert codes(await bench.fetch(VERSION, ask(VERSION, 25))) == [ErrorCode.REPLICA_NOT_AVAILABLE]
    assert bench.tier.storage.gets == []
    response = await bench.fetch(VERSION, ask(VERSION, 150), ask_local(VERSION, 0))
    assert codes(response) == [0, 0]
    assert records(response).startswith(bench.batches[15])
    assert codes(await bench.fetch(VERSION, ask(VERSION, 300))) == [ErrorCode.OFFSET_OUT_OF_RANGE]


async def test_a_connection_that_reads_the_remote_tier_stops_and_goes_on(bench: Bench) -> None:
    """Its next read would begin together with the request."""
    assert records(await bench.until_remote(VERSION, ask(VERSION, 25))).startswith(bench.batches[2])
    await pause(bench)
    before = len(bench.tier.storage.gets)
    for _ in range(3):
        assert codes(await bench.fetch(VERSION, ask(VERSION, 60))) == [ErrorCode.REPLICA_NOT_AVAILABLE]
    assert len(bench.tier.storage.gets) == before
    await pause(bench, None)
    assert records(await bench.until_remote(VERSION, ask(VERSION, 60))).startswith(bench.batches[6])


async def test_the_client_does_not_ask_in_a_hot_loop(bench: Bench) -> None:
    await pause(bench)
    await bench.fetch(VERSION, ask(VERSION, 25), max_wait_ms=200)
    assert bench.last is not None
    began_ms = bench.last.request.received_at_ms
    response = await bench.fetch(VERSION, ask(VERSION, 25), max_wait_ms=200)
    assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE]
    assert bench.last.request.received_at_ms - began_ms >= 200


async def test_paused_reading_refuses_searches_and_keeps_the_bounds(tmp_path: Path) -> None:
    """A pause must not make a consumer begin behind the remote records."""
    async with list_offsets_bench.bench_of(tmp_path, FetchSettings()) as bench:
        metadata = bench.tier.rlmm
        await metadata.change_topic_tier_config(TOPIC_ID, "orders", {TierWork.READING.key: "true"})
        for asked in (MAX, 240):
            answer = await bench.ask(8, asked, offset=5, timestamp=260)
            assert answer.error_code == ErrorCode.REPLICA_NOT_AVAILABLE
        assert found(await bench.ask(8, EARLIEST, offset=4)) == (0, -1, 0, 2)
        assert found(await bench.ask(8, LATEST, offset=6)) == (0, -1, 6, 5)
        assert found(await bench.ask(9, LATEST_TIERED, offset=-1, epoch=-1)) == (0, -1, 3, 3)
        await metadata.change_topic_tier_config(TOPIC_ID, "orders", {TierWork.READING.key: None})
        assert found(await bench.ask(8, 240, offset=5, timestamp=260)) == (0, 300, 1, 2)
