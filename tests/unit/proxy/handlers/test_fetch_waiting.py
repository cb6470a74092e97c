"""The waiting time of an answer with a slow remote partition beside busy, quiet and doubtful local partitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from proxy.handlers.base import FetchSettings
from proxy.handlers.fetch import delayed
from proxy.handlers.fetch.delayed import Completion
from proxy.wire.memory import OVERSHOOT_BYTES
from tests.support.fakes.fetch_bench import (
    BATCH,
    LOCAL_0,
    Bench,
    ask,
    ask_local,
    bench_of,
    codes,
    records,
)
from tests.support.fakes.record_batches import batch_of
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    settings = FetchSettings(
        bounds_max_age_ms=600_000, local_poll_ms=20, remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000)
    )
    async with bench_of(tmp_path, settings) as made:
        yield made


async def test_a_busy_local_partition_does_not_wait_for_a_slow_remote_one(bench: Bench) -> None:
    await bench.fetch(13, ask(13, 0))
    bench.tier.storage.gate = asyncio.Event()
    async with asyncio.timeout(60):
        response = await bench.fetch(13, ask(13, 60), ask_local(13, 0), max_wait_ms=60_000)
    assert records(response, 1)
    assert records(response, 0) == b""
    bench.tier.storage.gate.set()
    response = await bench.until_remote(13, ask(13, 60), ask_local(13, 0))
    assert records(response, 0).startswith(bench.batches[6])
    assert records(response, 1)
    assert len(bench.tier.storage.gets) == 2


async def test_doubts_about_a_partition_hold_local_data_back_only_for_a_moment(bench: Bench) -> None:
    hanging = asyncio.Event()

    async def hang(partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        await hanging.wait()

    bench.tier.rlmm.fresh = False
    bench.tier.rlmm.log.ensure_fresh = hang  # type: ignore[method-assign]  # a metadata topic that does not answer
    async with asyncio.timeout(30):
        response = await bench.fetch(13, ask(13, 60), ask_local(13, 0), max_wait_ms=60_000)
    assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE, 0]
    assert records(response, 1)
    hanging.set()


async def test_new_local_data_ends_the_wait_for_a_slow_remote_partition(bench: Bench) -> None:
    await bench.fetch(13, ask(13, 0))
    bench.tier.storage.gate = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        waiting = group.create_task(bench.fetch(13, ask(13, 60), ask_local(13, 10), max_wait_ms=60_000))
        await bench.cluster.polled.wait()
        arrived = batch_of(10, BATCH)
        bench.cluster.logs[LOCAL_0].batches.append(arrived)
        bench.cluster.arrived.set()
    response = waiting.result()
    assert (records(response, 0), records(response, 1)) == (b"", arrived)
    assert codes(response) == [0, 0]
    bench.tier.storage.gate.set()


async def test_a_request_with_local_partitions_is_held_no_longer_than_max_wait(bench: Bench) -> None:
    await bench.fetch(13, ask(13, 0))
    bench.tier.storage.gate = asyncio.Event()
    async with asyncio.timeout(30):
        response = await bench.fetch(13, ask(13, 60), ask_local(13, 10), max_wait_ms=30)
    assert codes(response) == [0, 0]
    assert bench.handler.purgatory.completed == {Completion.SATISFIED: 1, Completion.EXPIRED: 1}
    bench.tier.storage.gate.set()


async def test_a_disconnect_while_waiting_releases_everything(bench: Bench) -> None:
    await bench.fetch(13, ask(13, 0))
    bench.tier.storage.gate = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        bench.tier.storage.asked.clear()
        waiting = group.create_task(bench.fetch(13, ask(13, 60), max_wait_ms=60_000))
        await bench.tier.storage.asked.wait()
        while not bench.handler.purgatory.pending_count:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0)
        assert bench.handler.held_bytes > 0
        waiting.cancel()
    assert bench.handler.purgatory.pending_count == 0
    assert bench.handler.held_bytes == 0
    bench.tier.storage.gate.set()


def counted_reads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[RemoteReadRequest]:
    """Returns the list of the reads that the handler begins from now on."""
    begun: list[RemoteReadRequest] = []
    read = bench.reader.read

    async def counted(request: RemoteReadRequest) -> RemoteRead:
        begun.append(request)
        return await read(request)

    monkeypatch.setattr(bench.reader, "read", counted)
    return begun


async def test_a_slow_store_does_not_hold_up_the_connection(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send heartbeats on the same connection. The read outlives the answers, and is not begun again."""
    await bench.fetch(13, ask(13, 0))
    bench.tier.storage.gate = asyncio.Event()
    begun = counted_reads(bench, monkeypatch)
    for _ in range(3):
        response = await bench.fetch(13, ask(13, 60), max_wait_ms=1)
        assert (codes(response), records(response)) == ([0], b"")
        (read,) = bench.handler.connection(1).reads.values()
        assert not read.is_done
    bench.tier.storage.gate.set()
    assert records(await bench.until_remote(13, ask(13, 60), max_wait_ms=1)).startswith(bench.batches[6])
    assert [request.offset for request in begun] == [60]
    assert len(bench.tier.storage.gets) == 2
    assert bench.handler.held_bytes == 0


async def test_the_records_of_a_read_that_outlives_its_answer_count(bench: Bench) -> None:
    await bench.fetch(13, ask(13, 0))
    bench.tier.storage.gate = asyncio.Event()
    for _ in range(3):
        await bench.fetch(13, ask(13, 60, max_bytes=2000), max_wait_ms=1)
        assert bench.handler.held_bytes == 2000 + OVERSHOOT_BYTES
    (read,) = bench.handler.connection(1).reads.values()
    bench.tier.storage.gate.set()
    async with asyncio.timeout(60):
        while not read.size_bytes or bench.handler.held_bytes != read.size_bytes:  # noqa: ASYNC110 - a budget has no event
            await asyncio.sleep(0.001)
    read.cancel()
    assert bench.handler.held_bytes == 0


async def test_a_read_that_no_request_takes_over_is_released(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.fetch(13, ask(13, 0))
    bench.tier.storage.gate = asyncio.Event()
    monkeypatch.setattr(delayed, "_LINGER_S", 0.01)
    await bench.fetch(13, ask(13, 60, max_bytes=2000), max_wait_ms=1)
    assert bench.handler.held_bytes > 2000
    async with asyncio.timeout(60):
        while bench.handler.held_bytes:  # noqa: ASYNC110 - a budget has no event
            await asyncio.sleep(0.001)
    assert bench.handler.connection(1).reads == {}


async def test_a_read_goes_on_for_a_request_with_other_limits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for more records waits for it. A request for fewer records needs another read."""
    await bench.fetch(13, ask(13, 0))
    bench.tier.storage.gate = asyncio.Event()
    begun = counted_reads(bench, monkeypatch)
    for max_bytes in (2000, 3000, 1000):
        await bench.fetch(13, ask(13, 60, max_bytes=max_bytes), max_wait_ms=1)
    bench.tier.storage.gate.set()
    assert [request.max_bytes for request in begun] == [2000, 1000]


async def test_a_store_that_is_down_is_no_error_and_no_hot_loop(tmp_path: Path) -> None:
    """The client asks again and again, also after the read has ended with an error."""
    settings = FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=1_500))
    async with bench_of(tmp_path, settings) as bench, asyncio.timeout(60):
        await bench.fetch(13, ask(13, 0))
        bench.tier.storage.fail(10_000)
        started_ms = monotonic_ms()
        told = [codes(await bench.fetch(13, ask(13, 60), max_wait_ms=1)) for _ in range(3)]
        assert told == [[0]] * 3
        assert monotonic_ms() - started_ms >= 3 * 500
