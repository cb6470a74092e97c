"""A Fetch of many partitions is decoded beside the event loop, and its partitions are looked at in slices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from proxy.handlers.fetch import handler
from proxy.handlers.off_loop import LOOP_BYTES, SLICE_ITEMS
from proxy.wire.exchange import Answer, Forward, Prepare
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fetch_frames import fetch_frame
from tests.support.fakes.fetch_bench import Bench, ask, ask_local, bench_of, codes, records
from tests.support.fakes.remote_tier import TOPIC_ID
from tests.support.proxy.turn_counter import counted_turns
from tiers.model.ids import TopicIdPartition

VERSIONS = (4, 12, 18)
MANY = 3 * SLICE_ITEMS
FOLLOWERS_END = b"\x01\x01\x0d" + bytes(13)
"""One tagged field: the ReplicaState of a follower."""


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path) as made:
        yield made


@pytest.fixture
def decoded_on_loop(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each message was decoded on the event loop."""
    found: list[bool] = []

    def noted(decode: Any) -> Any:
        def decoder(*arguments: Any) -> Any:
            found.append(threading.current_thread() is threading.main_thread())
            return decode(*arguments)

        return decoder

    for name in ("parse_fetch_request", "parse_fetch_response"):
        monkeypatch.setattr(handler, name, noted(getattr(handler, name)))
    return found


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_large_fetch_of_both_tiers_is_decoded_beside_the_loop(
    bench: Bench, version: int, decoded_on_loop: list[bool]
) -> None:
    await bench.fetch(version, ask(version, 0))
    decoded_on_loop.clear()
    empty = range(2, 2 + MANY)
    bench.cluster.logs |= {TopicIdPartition(TOPIC_ID, number, "orders"): LocalLog([]) for number in empty}
    others = [ask(version, 0, partition=number) for number in empty]
    response = await bench.fetch(version, ask(version, 25), *others)
    assert len(codes(response)) == 1 + MANY
    assert records(response).startswith(bench.batches[2])
    assert decoded_on_loop == [False, False]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_small_fetch_of_both_tiers_is_decoded_at_once(
    bench: Bench, version: int, decoded_on_loop: list[bool]
) -> None:
    await bench.fetch(version, ask(version, 0))
    decoded_on_loop.clear()
    assert records(await bench.fetch(version, ask(version, 25))).startswith(bench.batches[2])
    assert decoded_on_loop == [True, True]


async def test_a_first_large_fetch_of_the_remote_tier_is_decoded_beside_the_loop(
    bench: Bench, decoded_on_loop: list[bool]
) -> None:
    """The proxy decodes the request only when the broker has answered OFFSET_OUT_OF_RANGE in a response that it holds.

    A broker answers a duplicate once, so such a response may be small."""
    frame = fetch_frame(17, [ask(17, 25)] * MANY)
    exchange = FakeExchange(bench.cluster, frame)
    action, state = bench.handler.on_request(exchange)
    assert isinstance(action, Forward)
    assert state is not None
    answer = state.on_response(memoryview(bench.cluster.answer(fetch_frame(17, [ask(17, 25)]))))
    assert isinstance(answer, Coroutine)
    await answer
    assert decoded_on_loop == [True, False]  # the small response, and the large request


async def test_a_fetch_that_looks_like_a_followers_is_decoded_beside_the_loop(
    bench: Bench, decoded_on_loop: list[bool]
) -> None:
    frame = fetch_frame(17, [ask_local(17, 0)] * MANY)
    assert len(frame) > LOOP_BYTES
    action, _ = bench.handler.on_request(FakeExchange(bench.cluster, frame[:-1] + FOLLOWERS_END))
    assert isinstance(action, Prepare)
    forwarded = await action.decide()
    assert isinstance(forwarded, Forward)
    assert forwarded.frame == frame[:-1] + FOLLOWERS_END
    assert decoded_on_loop == [False]


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
    assert max(turns.notes.values()) <= SLICE_ITEMS


async def test_a_refused_session_of_a_large_fetch_is_answered_by_the_proxy(bench: Bench) -> None:
    bench.handler.connection(1).drops_session = True
    frame = fetch_frame(17, [ask_local(17, 0)] * MANY, session_id=77, session_epoch=4)
    action, _ = bench.handler.on_request(FakeExchange(bench.cluster, frame))
    assert isinstance(action, Prepare)
    assert isinstance(await action.decide(), Answer)
    await asyncio.sleep(0)
