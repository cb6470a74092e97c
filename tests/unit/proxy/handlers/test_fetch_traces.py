"""The spans of a Fetch that needs the remote tier: which there are, whose children they are, and what they tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from proxy.handlers.base import FetchSettings
from proxy.handlers.fetch.trace import ABANDONED
from proxy.wire.exchange import Forward
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fetch_frames import fetch_frame
from tests.support.fakes.fetch_bench import P0, Bench, ask, ask_local, bench_of, codes, records
from tests.support.fakes.recording_tracer import RecordingTracer
from tiers.config.settings import RemoteLogConfig
from tiers.errors import RemoteStorageError
from tiers.tracing import (
    BrokerAnswered,
    BrokerFetch,
    ClientFetch,
    FetchAnswered,
    Judged,
    Judging,
    PartitionRead,
    PurgatoryWait,
    RecordsRead,
    StoreAnswered,
    StoreRead,
    Waited,
)

COLD = [
    "ClientFetch: FetchAnswered",
    "  BrokerFetch: BrokerAnswered",
    "  Judging: Judged",
    "  PurgatoryWait: Waited",
    "  PartitionRead: RecordsRead",
    "    StoreRead: StoreAnswered",
    "    StoreRead: StoreAnswered",
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


async def test_a_fetch_over_both_tiers_has_one_trace(bench: Bench, tracer: RecordingTracer) -> None:
    response = await bench.fetch(13, ask(13, 0, max_bytes=1), ask_local(13, 0), min_bytes=1_000, max_wait_ms=60_000)
    assert codes(response) == [0, 0]
    assert tracer.tree() == COLD
    assert [span.ends for span in tracer.spans] == [1] * len(COLD)
    assert bench.last is not None
    request = bench.last.request
    (client,), (broker,) = tracer.of(ClientFetch), tracer.of(BrokerFetch)
    assert client.work == ClientFetch("test", request.correlation_id, 13, 2)
    assert client.began_at_ms == broker.began_at_ms == request.received_at_ms
    assert broker.work == BrokerFetch(1)
    local_bytes, remote_bytes = len(records(response, 1)), len(records(response, 0))
    assert broker.outcomes == [BrokerAnswered(local_bytes, 1, 0)]
    (answered,) = client.outcomes
    assert isinstance(answered, FetchAnswered)
    assert (answered.remote_bytes, answered.error_codes) == (remote_bytes, ())
    assert answered.size_bytes > local_bytes + remote_bytes > 0


async def test_a_read_tells_its_segment_and_each_call_of_the_store(bench: Bench, tracer: RecordingTracer) -> None:
    response = await bench.fetch(13, ask(13, 60, max_bytes=1))
    segment = bench.tier.state.remote_log_segment_metadata(P0, 60)
    assert segment is not None
    segment_id = segment.segment_id.id
    (read,) = tracer.of(PartitionRead)
    assert read.work == PartitionRead("orders", P0.topic_id, 0, 60, 1)
    assert read.outcomes == [RecordsRead(segment_id, len(records(response)), is_cache_hit=False)]
    index, get = tracer.of(StoreRead)
    assert index.work == StoreRead("fetch_indexes", "orders", 0, segment_id)
    ((start, end),) = bench.tier.storage.gets
    assert get.work == StoreRead("fetch_log_segment", "orders", 0, segment_id, start, end)
    assert get.outcomes == [StoreAnswered(end - start + 1)]


async def test_a_read_tells_that_its_chunk_was_in_memory(bench: Bench, tracer: RecordingTracer) -> None:
    await bench.fetch(13, ask(13, 60))
    tracer.spans.clear()
    await bench.fetch(13, ask(13, 60))
    assert tracer.tree() == WARM
    (judging,), (wait,), (read,) = tracer.of(Judging), tracer.of(PurgatoryWait), tracer.of(PartitionRead)
    assert (judging.outcomes, wait.outcomes) == ([Judged(("remote",))], [Waited("satisfied")])
    (found,) = read.outcomes
    assert isinstance(found, RecordsRead)
    assert found.is_cache_hit


async def test_a_fetch_of_the_local_tier_has_no_trace(bench: Bench, tracer: RecordingTracer) -> None:
    assert records(await bench.fetch(13, ask(13, 150), ask_local(13, 0)))
    assert tracer.spans == []


async def test_a_fetch_that_is_not_sampled_has_no_spans(bench: Bench, tracer: RecordingTracer) -> None:
    tracer.is_sampling = False
    for _ in range(2):
        assert records(await bench.fetch(13, ask(13, 0)))
    assert tracer.spans == []


async def test_a_failing_store_is_on_the_spans_that_saw_it(bench: Bench, tracer: RecordingTracer) -> None:
    bench.tier.storage.fail(1)
    assert records(await bench.fetch(13, ask(13, 0, max_bytes=1)))
    index, failed, repeated = tracer.of(StoreRead)
    assert (index.errors, failed.errors, repeated.errors) == ([], ["RetriableRemoteStorageError"], [])
    assert [span.errors for span in tracer.of(PartitionRead)] == [[]]


async def test_a_read_that_fails_is_an_error_of_the_fetch(bench: Bench, tracer: RecordingTracer) -> None:
    bench.tier.storage.failures.append(RemoteStorageError("access denied"))
    (code,) = codes(await bench.fetch(13, ask(13, 0, max_bytes=1)))
    assert code == ErrorCode.REPLICA_NOT_AVAILABLE
    assert [span.errors for span in tracer.of(PartitionRead)] == [["RemoteStorageError"]]
    (answered,) = tracer.of(ClientFetch)[0].outcomes
    assert isinstance(answered, FetchAnswered)
    assert answered.error_codes == (code,)


async def test_a_fetch_names_the_trace_whose_slow_read_it_uses(bench: Bench, tracer: RecordingTracer) -> None:
    await bench.fetch(13, ask(13, 0))
    tracer.spans.clear()
    bench.tier.storage.gate = asyncio.Event()
    async with asyncio.timeout(60):
        assert records(await bench.fetch(13, ask(13, 60), ask_local(13, 0)), 0) == b""
        bench.tier.storage.gate.set()
        assert records(await bench.until_remote(13, ask(13, 60), ask_local(13, 0)), 0)
    first, second = tracer.of(ClientFetch)[:2]
    assert [wait.used for wait in tracer.of(PurgatoryWait)[:2]] == [[], [first.context]]
    assert second.context != first.context
    assert [read.parent for read in tracer.of(PartitionRead)] == [first.context]


async def test_a_foreseen_fetch_that_is_abandoned_ends_its_spans(bench: Bench, tracer: RecordingTracer) -> None:
    await bench.fetch(13, ask(13, 0))
    tracer.spans.clear()
    exchange = FakeExchange(bench.cluster, fetch_frame(13, [ask(13, 0)]))
    action, state = bench.handler.on_request(exchange)
    assert isinstance(action, Forward)
    assert state is not None
    await asyncio.sleep(0)
    client, broker, _ = tracer.spans
    assert [type(span.work) for span in tracer.spans] == [ClientFetch, BrokerFetch, PartitionRead]
    assert client.ends == broker.ends == 0
    state.on_abandoned()
    assert exchange.on_sent is not None
    exchange.on_sent()
    assert bench.handler.held_bytes == 0
    assert (client.errors, client.ends) == ([ABANDONED], 1)
    assert (broker.errors, broker.ends) == ([ABANDONED], 1)
