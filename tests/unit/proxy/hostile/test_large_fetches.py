"""A Fetch of many partitions is worked on in slices, and the event loop goes on between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protocol.api_keys import ApiKey
from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.apis.fetch.stream import PartitionHead, StreamingFetchPatcher
from proxy.handlers.fetch.merge import merge
from proxy.handlers.turns import SLICE_ITEMS, SLICE_STEPS
from proxy.wire.exchange import Answer, Forward, Prepare
from proxy.wire.upstream import GROUPS_AT_ONCE
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fetch_frames import fetch_frame
from tests.support.fakes.broker.wire import request
from tests.support.fakes.fetch_bench import Bench, ask, ask_local, bench_of, codes, records
from tests.support.fakes.remote_tier import TOPIC_ID
from tests.support.proxy.proxy_harness import ForwardingHandler, relayed
from tests.support.proxy.turn_counter import counted_turns
from tiers.model.ids import TopicIdPartition

VERSIONS = (4, 12, 18)
MANY = 3 * SLICE_STEPS
FOLLOWERS_END = b"\x01\x01\x0d" + bytes(13)
"""One tagged field: the ReplicaState of a follower."""
CONSUMERS_END = b"\x01\x01\x0dus-east-1a-x\x00"
"""No topics, no forgotten ones, and a rack of 12 characters."""


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path) as made:
        yield made


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_large_fetch_of_both_tiers_is_merged_in_slices(
    bench: Bench, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.fetch(version, ask(version, 0))
    empty = range(2, 2 + MANY)
    bench.cluster.logs |= {TopicIdPartition(TOPIC_ID, number, "orders"): LocalLog([]) for number in empty}
    others = [ask(version, 0, partition=number) for number in empty]
    async with counted_turns() as turns:
        monkeypatch.setattr(merge, "steps", turns.noted(merge.steps))
        response = await bench.fetch(version, ask(version, 25), *others, max_wait_ms=10_000)
    assert len(codes(response)) == 1 + MANY
    assert records(response).startswith(bench.batches[2])
    assert sum(turns.notes.values()) >= MANY
    assert max(turns.notes.values()) <= SLICE_STEPS


@pytest.mark.parametrize(("end", "is_followers"), [(FOLLOWERS_END, True), (CONSUMERS_END, False)])
async def test_a_large_fetch_of_a_follower_is_known_without_decoding(
    bench: Bench, end: bytes, is_followers: bool
) -> None:
    frame = fetch_frame(17, [ask_local(17, 0)] * MANY)[:-1] + end
    action, state = bench.handler.on_request(FakeExchange(bench.cluster, frame))
    assert isinstance(action, Forward)
    assert action.frame == frame
    assert (state is None) == is_followers


@pytest.mark.parametrize(("version", "replica_id"), [(4, 7), (14, -3)])
async def test_a_large_fetch_with_a_replica_id_is_not_decoded(bench: Bench, version: int, replica_id: int) -> None:
    """The client chooses the id, and the request may have very many topics."""
    await bench.fetch(17, ask(17, 0))
    frame = fetch_frame(version, [ask_local(version, 0)] * MANY, replica_id=replica_id)
    assert bench.handler.on_request(FakeExchange(bench.cluster, frame)) == (Forward(frame), None)


async def test_the_partitions_of_a_large_fetch_leave_the_loop_its_turns(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.fetch(17, ask(17, 0))
    known_partition = bench.handler._local.known_partition
    async with counted_turns() as turns:

        def noted(*arguments: Any) -> Any:
            turns.note()
            return known_partition(*arguments)

        monkeypatch.setattr(bench.handler._local, "known_partition", noted)
        frame = fetch_frame(17, [ask(17, 0, partition=2 + number) for number in range(MANY)])
        action, _ = bench.handler.on_request(FakeExchange(bench.cluster, frame))
        assert isinstance(action, Prepare)
        await action.decide()
    assert sum(turns.notes.values()) >= MANY
    assert max(turns.notes.values()) <= SLICE_STEPS


async def test_many_refused_partitions_are_judged_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = range(2, 2 + 4 * SLICE_ITEMS)
    batches = bench.batches[10:]
    bench.cluster.logs |= {TopicIdPartition(TOPIC_ID, number, "orders"): LocalLog(batches, 100) for number in asked}
    judge = bench.handler._judge._judge_one
    async with counted_turns() as turns:

        def noted(*arguments: Any) -> Any:
            turns.note()
            return judge(*arguments)

        monkeypatch.setattr(bench.handler._judge, "_judge_one", noted)
        response = await bench.fetch(17, *(ask(17, 25, partition=number) for number in asked))
    assert len(codes(response)) == len(asked)
    assert sum(turns.notes.values()) == len(asked)
    assert max(turns.notes.values()) <= SLICE_ITEMS


async def decided(action: Prepare) -> Answer | Forward:
    return await action.decide()


async def test_a_client_that_leaves_ends_the_reads_of_its_large_fetch(bench: Bench) -> None:
    await bench.fetch(17, ask(17, 0))
    frame = fetch_frame(17, [ask(17, 25, max_bytes=1), *(ask_local(17, 0) for _ in range(MANY))])
    exchange = FakeExchange(bench.cluster, frame)
    action, _ = bench.handler.on_request(exchange)
    assert isinstance(action, Prepare)
    async with asyncio.TaskGroup() as tasks:
        preparing = tasks.create_task(decided(action))
        await asyncio.sleep(0)
        preparing.cancel()
    if exchange.on_sent is not None:
        exchange.on_sent()
    assert bench.handler.held_bytes == 0


async def test_a_refused_session_of_a_large_fetch_is_answered_by_the_proxy(bench: Bench) -> None:
    bench.handler.connection(1).drops_session = True
    frame = fetch_frame(17, [ask_local(17, 0)] * MANY, session_id=77, session_epoch=4)
    action, _ = bench.handler.on_request(FakeExchange(bench.cluster, frame))
    assert isinstance(action, Prepare)
    assert isinstance(await action.decide(), Answer)
    await asyncio.sleep(0)


async def test_many_small_partitions_of_a_streamed_answer_are_patched_in_slices() -> None:
    """The broker's bytes arrive in one read, and other clients have their turns in between."""
    entries = [encode_partition(12, number) for number in range(4 * GROUPS_AT_ONCE)]
    answer = b"".join(encode_response(12, 7, [("orders", entries)]))
    async with counted_turns() as turns:

        class Noted:
            def partition(self, head: PartitionHead) -> None:
                turns.note()

        handler = ForwardingHandler(
            lambda exchange, held: (held,), hold_bytes=16, patcher=lambda: StreamingFetchPatcher(12, Noted())
        )
        async with relayed(handlers={ApiKey.FETCH: handler}) as (client, broker, _):
            await client.send(request(ApiKey.FETCH, 12, 7))
            upstream = await broker.accepted()
            await upstream.receive()
            await upstream.send(answer)
            assert await client.receive() == answer
            await client.send(request(ApiKey.FETCH, 12, 7))
            await upstream.receive()
            await upstream.send(answer)
            assert await client.receive() == answer
    assert sum(turns.notes.values()) == 2 * len(entries)
    assert max(turns.notes.values()) <= GROUPS_AT_ONCE
