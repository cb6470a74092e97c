"""The spans of a Fetch that needs the remote tier: which there are, whose children they are, and what they tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.handlers.base import FetchSettings
from proxy.handlers.fetch.trace import ABANDONED
from proxy.wire.exchange import Forward
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fetch_frames import fetch_frame
from tests.support.fakes.fetch_bench import Bench, ask, ask_local, bench_of, codes, records
from tests.support.fakes.recording_tracer import RecordingTracer
from tiers.config.settings import RemoteLogConfig

COLD = [
    "Fetch",
    "  forward Fetch",
    "  judge",
    "  purgatory",
    "  read orders",
    "    fetch_indexes",
    "    fetch_log_segment",
]
WARM = COLD[:5]
"""Without a call of the store."""


@pytest.fixture
def tracer() -> RecordingTracer:
    return RecordingTracer()


@pytest.fixture
async def bench(tmp_path: Path, tracer: RecordingTracer) -> AsyncIterator[Bench]:
    settings = FetchSettings(local_poll_ms=20, remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000))
    async with bench_of(tmp_path, settings, tracer=tracer) as made:
        yield made


async def test_the_store_is_called_only_for_a_chunk_that_is_not_in_memory(
    bench: Bench, tracer: RecordingTracer
) -> None:
    for tree, cache in ((COLD, "miss"), (WARM, "hit")):
        tracer.spans.clear()
        assert codes(await bench.fetch(13, ask(13, 60, max_bytes=1))) == [0]
        assert tracer.tree() == tree
        assert [span.ends for span in tracer.spans] == [1] * len(tree)
        assert [read.attributes["tidegate.chunk_cache"] for read in tracer.of("read orders")] == [cache]
    assert bench.last is not None
    (client,), (broker,) = tracer.of("Fetch"), tracer.of("forward Fetch")
    assert client.began_at_ms == broker.began_at_ms == bench.last.request.received_at_ms


async def test_a_fetch_of_the_local_tier_has_no_trace(bench: Bench, tracer: RecordingTracer) -> None:
    assert records(await bench.fetch(13, ask(13, 150), ask_local(13, 0)))
    assert tracer.spans == []


async def test_a_failing_store_is_on_the_spans_that_saw_it(bench: Bench, tracer: RecordingTracer) -> None:
    bench.tier.storage.fail(1)
    assert records(await bench.fetch(13, ask(13, 0, max_bytes=1)))
    failed, repeated = tracer.of("fetch_log_segment")
    assert (failed.errors, repeated.errors) == (["RetriableRemoteStorageError"], [])
    assert [span.errors for span in tracer.of("read orders")] == [[]]


async def test_a_fetch_names_the_trace_whose_slow_read_it_uses(bench: Bench, tracer: RecordingTracer) -> None:
    await bench.fetch(13, ask(13, 0))
    tracer.spans.clear()
    bench.tier.storage.gate = asyncio.Event()
    async with asyncio.timeout(60):
        assert records(await bench.fetch(13, ask(13, 60), ask_local(13, 0)), 0) == b""
        bench.tier.storage.gate.set()
        assert records(await bench.until_remote(13, ask(13, 60), ask_local(13, 0)), 0)
    first, second = tracer.of("Fetch")[:2]
    assert [wait.used for wait in tracer.of("purgatory")[:2]] == [[], [first.context]]
    assert second.context != first.context
    assert [read.parent for read in tracer.of("read orders")] == [first.context]


async def test_a_foreseen_fetch_that_is_abandoned_ends_its_spans(bench: Bench, tracer: RecordingTracer) -> None:
    await bench.fetch(13, ask(13, 0))
    tracer.spans.clear()
    exchange = FakeExchange(bench.cluster, fetch_frame(13, [ask(13, 0)]))
    action, state = bench.handler.on_request(exchange)
    assert isinstance(action, Forward)
    assert state is not None
    await asyncio.sleep(0)
    client, broker, _ = tracer.spans
    assert [span.name for span in tracer.spans] == ["Fetch", "forward Fetch", "read orders"]
    assert client.ends == broker.ends == 0
    state.on_abandoned()
    assert exchange.on_sent is not None
    exchange.on_sent()
    assert bench.handler.held_bytes == 0
    assert (client.errors, client.ends) == ([ABANDONED], 1)
    assert (broker.errors, broker.ends) == ([ABANDONED], 1)
