"""No fault of the broker, the store or the client makes a consumer skip, jump or starve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from protocol.apis.fetch.response import FetchResponse
from protocol.errors import ErrorCode
from proxy.cluster.local_log_bounds import Watermarks
from proxy.config import LimitsConfig
from proxy.handlers.base import FetchSettings
from proxy.wire.exchange import Forward
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fetch_frames import Ask, fetch_frame
from tests.support.fakes.fetch_bench import LOCAL_0, P0, P1, Bench, ask, ask_local, bench_of, codes, parse, records
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tiers.config.settings import RemoteLogConfig
from tiers.errors import OffsetBelowLogStartError, OffsetGapError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.reader.remote_log_reader import RemoteRead


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path) as made:
        yield made


async def answered(bench: Bench, version: int, asks: list[Ask], broker_sees: list[Ask]) -> FetchResponse:
    """For requests that a broker folds before it reads."""
    _, respond = bench.handler.on_request(FakeExchange(bench.cluster, fetch_frame(version, asks)))
    assert respond is not None
    answer = respond(memoryview(bench.cluster.answer(fetch_frame(version, broker_sees))))
    assert isinstance(answer, Coroutine)
    return parse(version, await answer)


@pytest.mark.parametrize("version", [5, 12, 13])
@pytest.mark.parametrize("first", [150, 190, 40])
async def test_the_last_offset_of_a_partition_named_twice_counts(bench: Bench, version: int, first: int) -> None:
    asks = [ask(version, first), ask(version, 25)]
    for _ in range(2):  # unforeseen, then predicted
        response = await answered(bench, version, asks, asks[1:])
        assert codes(response) == [0]
        assert records(response).startswith(bench.batches[2])


async def test_a_read_that_saw_no_log_start_never_makes_the_client_jump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def below(*args: object, **more: object) -> NoReturn:
        raise OffsetBelowLogStartError("the state was empty a moment ago")

    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=50))) as bench:
        monkeypatch.setattr(bench.reader, "read", below)
        async with asyncio.timeout(60):
            while (told := codes(await bench.fetch(13, ask(13, 25)))) == [0]:
                pass  # empty: not even begun in time
        assert told == [ErrorCode.REPLICA_NOT_AVAILABLE]
        await bench.tier.rlmm.put_log_start(P0, user_log_start(30))
        assert codes(await bench.fetch(13, ask(13, 25), max_wait_ms=60_000)) == [ErrorCode.OFFSET_OUT_OF_RANGE]


async def test_the_bounds_of_an_old_topic_do_not_serve_a_recreated_one(bench: Bench) -> None:
    """The old id is still cached, and so are its bounds; the leader knows neither any more."""
    assert records(await bench.fetch(12, ask(12, 25)))
    bench.cluster.is_reachable = False
    response = await bench.fetch(12, ask(12, 25), ask_local(12, 0))
    assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE, 0]
    assert records(response) == b""
    bench.cluster.is_reachable = True
    assert records(await bench.fetch(12, ask(12, 25)))


async def test_a_leader_that_was_deposed_does_not_say_what_lies_beyond_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor has trimmed what it itself has not even got."""

    async def deposed(partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        return LocalLogBounds(0, 100, 100, 4)

    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=50))) as bench:
        bench.cluster.logs[P0].log_start_offset = 180
        monkeypatch.setattr(bench.cluster, "bounds", deposed)
        response = await bench.fetch(13, ask(13, 150, leader_epoch=5))
        assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE]


@pytest.mark.parametrize(("follower_start", "follower_end", "offset"), [(100, 150, 180), (130, 200, 120)])
async def test_a_follower_with_other_bounds_makes_no_consumer_jump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follower_start: int, follower_end: int, offset: int
) -> None:
    """It may have less, at either end: an error sends its consumer back to the leader (KIP-392)."""

    async def of_the_leader(partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        return LocalLogBounds(100, 200, 200, 5)

    async with bench_of(tmp_path, FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=50))) as bench:
        bench.cluster.logs[P0] = LocalLog(bench.batches[: follower_end // 10], follower_start)
        monkeypatch.setattr(bench.cluster, "bounds", of_the_leader)
        for version in (12, 13):
            response = await bench.fetch(version, ask(version, offset, leader_epoch=5))
            assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE]
        remote = await bench.fetch(13, ask(13, 60, leader_epoch=5), max_wait_ms=60_000)
        assert records(remote).startswith(bench.batches[6])


async def test_answers_that_a_client_does_not_read_stay_held(tmp_path: Path) -> None:
    """The limit holds for both tiers together. Memory beyond the answer is released when the answer is complete."""
    settings = FetchSettings(
        remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000), limits=LimitsConfig(max_decoded_bytes=6 << 20)
    )
    async with bench_of(tmp_path, settings) as bench:
        await bench.fetch(13, ask(13, 0))
        assert bench.handler.held_bytes == 0
        frame = fetch_frame(13, [ask(13, 0)])
        exchange = FakeExchange(bench.cluster, frame)
        action, respond = bench.handler.on_request(exchange)
        assert isinstance(action, Forward)
        assert bench.handler.held_bytes > 1 << 20
        assert respond is not None
        answer = respond(memoryview(bench.cluster.answer(action.frame)))
        assert isinstance(answer, Coroutine)
        payload = await answer
        assert bench.handler.held_bytes == sum(map(len, payload)) > 0
        assert exchange.on_sent is not None
        exchange.on_sent()
        assert bench.handler.held_bytes == 0


async def test_requests_ahead_of_their_turn_read_no_more_than_the_cap(tmp_path: Path) -> None:
    """A client may send many requests before it reads an answer."""
    async with bench_of(tmp_path) as bench:
        await bench.fetch(13, ask(13, 0))
        pipelined = []
        for _ in range(20):
            exchange = FakeExchange(bench.cluster, fetch_frame(13, [ask(13, 0)], max_bytes=1 << 30))
            pipelined.append((exchange, bench.handler.on_request(exchange)))
        held_bytes = bench.handler.held_bytes
        assert 0 < held_bytes < 2 * LimitsConfig().max_decoded_bytes // 32
        reads = []
        for exchange, (action, respond) in pipelined:
            assert isinstance(action, Forward)
            assert isinstance(respond, partial)
            (held,) = respond.args
            reads.append(len(held.reads))
            answer = await respond(memoryview(bench.cluster.answer(action.frame)))
            assert records(parse(13, answer)).startswith(bench.batches[0])  # each is served when its turn comes
            assert exchange.on_sent is not None
            exchange.on_sent()
        assert reads == [1, 1] + [0] * 18  # each reserves 1 MiB, and 1 MiB for a batch beyond it
        assert bench.handler.held_bytes == 0


async def test_without_memory_records_are_still_served(tmp_path: Path) -> None:
    async with bench_of(
        tmp_path,
        FetchSettings(remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000), limits=LimitsConfig(max_decoded_bytes=1)),
    ) as bench:
        for _ in range(2):  # unforeseen and predicted
            assert records(await bench.fetch(13, ask(13, 20))).startswith(bench.batches[2])


async def test_bounds_that_come_too_late_for_one_answer_serve_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a local partition that always has records would starve the remote partition."""
    gate, asked = asyncio.Event(), 0

    async def slow(partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        nonlocal asked
        asked += 1
        await gate.wait()
        return LocalLogBounds(100, 200, 200, 5)

    monkeypatch.setattr("proxy.handlers.fetch.verdict._JUDGE_MAX_MS", 60_000)
    settings = FetchSettings(bounds_timeout_ms=60_000, remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000))
    async with bench_of(tmp_path, settings) as bench, asyncio.timeout(60):
        monkeypatch.setattr(bench.cluster, "bounds", slow)
        both = ask(13, 25, leader_epoch=5), ask_local(13, 0)
        response = await bench.fetch(13, *both)
        assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE, 0]
        gate.set()
        response = await bench.until_remote(13, *both)
        assert records(response, 0).startswith(bench.batches[2])
        assert asked == 1


@pytest.mark.parametrize("is_predicted", [False, True])
async def test_a_client_without_limits_gets_no_more_than_a_broker_would_give(
    tmp_path: Path, is_predicted: bool
) -> None:
    async with bench_of(
        tmp_path, FetchSettings(fetch_max_bytes=1000, remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000))
    ) as bench:
        if is_predicted:
            await bench.fetch(13, ask(13, 0, max_bytes=1))
        response = await bench.fetch(13, ask(13, 0, max_bytes=2**31 - 1), max_bytes=2**31 - 1)
        assert 0 < len(records(response)) <= 1000


async def test_a_partition_in_neither_tier_takes_no_budget_and_raises_the_alarm(bench: Bench) -> None:
    """It is foreseen to be out of range too, and stands first."""
    await bench.tier.add(P1, [batch_of(0, 3)], 0)
    bench.cluster.logs[P1] = LocalLog([batch_of(50, 10)], log_start_offset=50)
    await bench.fetch(13, ask(13, 55, partition=1), ask(13, 0))
    size = len(bench.batches[0])
    response = await bench.fetch(13, ask(13, 5, partition=1), ask(13, 0), max_bytes=size - 1)
    assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE, 0]
    assert records(response, 1) == bench.batches[0]
    assert bench.handler.in_neither_tier_count == 1


async def test_a_streamed_answer_never_makes_a_client_skip_missing_records(tmp_path: Path) -> None:
    async with bench_of(tmp_path, FetchSettings(hold_bytes=200)) as bench:
        await bench.tier.add(P1, [batch_of(0, 3)], 0)
        bench.cluster.logs[P1] = LocalLog([batch_of(50, 10)], log_start_offset=50)
        bench.cluster.logs[LOCAL_0] = LocalLog([batch_of(0, 10, value_bytes=100)])
        response = await bench.fetch(13, ask(13, 5, partition=1), ask_local(13, 0))
        assert bench.streamed
        assert codes(response) == [0, 0]
        response = await bench.fetch(13, ask(13, 5, partition=1), ask_local(13, 0))
        assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE, 0]


@pytest.mark.parametrize("seen", [Watermarks(7, 7), Watermarks(150, -1)])
async def test_old_watermarks_never_end_below_what_the_tier_has(tmp_path: Path, seen: Watermarks) -> None:
    """librdkafka takes a bound at the offset that it asks for as the end of the partition."""
    async with bench_of(tmp_path, FetchSettings(hold_bytes=200)) as bench:
        bench.cluster.logs[LOCAL_0] = LocalLog([batch_of(0, 10, value_bytes=100)])
        bench.handler._tools.bounds.see(P0, 0, seen)
        response = await bench.fetch(13, ask(13, 25), ask_local(13, 0))
        assert bench.streamed
        entry = response.partitions[0]
        assert entry.error_code == 0
        assert entry.high_watermark >= entry.last_stable_offset >= 120


async def test_only_remote_partitions_with_a_budget_are_read(bench: Bench) -> None:
    """The others are empty this time: a consumer asks for them first when these have brought something."""
    await bench.tier.add(P1, bench.batches[:10], 0)
    bench.cluster.logs[P1] = LocalLog(bench.batches, 100)
    size = len(bench.batches[0])
    asks = [ask(12, 0), ask(12, 0, partition=1)]
    await bench.fetch(12, *asks)
    asked = bench.cluster.bounds_asked
    response = await bench.fetch(12, *asks, max_bytes=size)
    assert [records(response, n) for n in (0, 1)] == [bench.batches[0], b""]
    assert codes(response) == [0, 0]
    assert bench.cluster.bounds_asked == asked + 1
    response = await bench.fetch(12, *reversed(asks), max_bytes=size)
    assert [records(response, n) for n in (0, 1)] == [bench.batches[0], b""]


@pytest.mark.parametrize("hold_bytes", [200, 1 << 18])
async def test_a_state_that_is_cleared_during_a_look_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold_bytes: int
) -> None:
    async with bench_of(tmp_path, FetchSettings(hold_bytes=hold_bytes)) as bench:

        def cleared(partition: TopicIdPartition) -> bool:
            bench.tier.rlmm.fresh = False
            return False

        monkeypatch.setattr(bench.tier.state, "is_known", cleared)
        bench.cluster.logs[LOCAL_0] = LocalLog([batch_of(0, 10, value_bytes=100)])
        response = await bench.fetch(13, ask(13, 25), ask_local(13, 0))
        assert bench.streamed is (hold_bytes == 200)
        assert codes(response) == [ErrorCode.REPLICA_NOT_AVAILABLE, 0]


async def test_a_read_that_began_on_old_metadata_is_made_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than waited for in vain until the deadline."""
    await bench.fetch(12, ask(12, 0))
    read = bench.reader.read
    calls = 0

    async def gap_first(*args: Any, **more: Any) -> RemoteRead:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OffsetGapError("not visible yet")
        return await read(*args, **more)

    monkeypatch.setattr(bench.reader, "read", gap_first)
    monkeypatch.setattr(bench.cluster, "bounds", slow_bounds)
    async with asyncio.timeout(60):
        response = await bench.fetch(12, ask(12, 60), max_wait_ms=60_000)
    assert records(response).startswith(bench.batches[6])


async def slow_bounds(partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
    for _ in range(10):
        await asyncio.sleep(0)
    return LocalLogBounds(100, 200, 200, 5)
