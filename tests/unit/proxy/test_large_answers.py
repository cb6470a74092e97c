"""Large answers reach the client byte for byte: whatever their pieces, whoever stalls, and whoever leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.api_keys import ApiKey
from protocol.apis.fetch.encoding import encode_partition, encode_response
from proxy.process.app import pass_through_handlers
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import Proxy, forwarded, relayed
from tests.support.tiers.waiting import until
from tiers.event_loop import EventLoop

KIB = 1024
TOPIC = UUID(int=17)
RECORDS = bytes(n % 251 for n in range(400 * KIB))
pytestmark = pytest.mark.usefixtures("every_relay")


def fetched(version: int, correlation_id: int, sizes: Sequence[int]) -> bytes:
    """A response with a partition for each of the sizes."""
    entries = [
        encode_partition(
            version, n, high_watermark=9, last_stable_offset=9, log_start_offset=0, records=[RECORDS[n : n + size]]
        )
        for n, size in enumerate(sizes)
    ]
    topic = TOPIC if version >= 13 else "a-topic"
    return b"".join(map(bytes, encode_response(version, correlation_id, [(topic, entries)])))


@contextlib.asynccontextmanager
async def exchange(*, receive_buffer_bytes: int = 0) -> AsyncIterator[tuple[FakeBroker, Proxy, Wire, Wire]]:
    """Yields a broker, a proxy, a client, and the client's connection to the broker, which has an opaque request."""
    async with relayed(receive_buffer_bytes=receive_buffer_bytes) as (client, broker, proxy):
        upstream = await forwarded(client, broker, request(OPAQUE, 4, 1))
        yield broker, proxy, client, upstream


async def converse(version: int, answers: Sequence[Sequence[int]], pieces: Sequence[int]) -> None:
    stream = b"".join(frame(fetched(version, n, sizes)) for n, sizes in enumerate(answers))

    async def answer(upstream: Wire) -> None:
        start, turn = 0, 0
        while start < len(stream):
            size = pieces[turn % len(pieces)]
            await upstream.send_raw(stream[start : start + size])
            start, turn = start + size, turn + 1
            for _ in range(turn % 3):
                await asyncio.sleep(0)

    async with (
        relayed(handlers=pass_through_handlers(), address_of=lambda _: ("proxy.example", 1)) as (client, broker, proxy),
        asyncio.TaskGroup() as tasks,
    ):
        upstream = await forwarded(client, broker, *(request(ApiKey.FETCH, version, n) for n in range(len(answers))))
        tasks.create_task(answer(upstream))
        for n, sizes in enumerate(answers):
            assert await client.receive() == fetched(version, n, sizes)
        await until(lambda: proxy.metrics.bytes_from_brokers >= len(stream))
        assert proxy.metrics.bytes_from_brokers == len(stream)


SIZES = st.sampled_from((0, 1, 500, 4 * KIB, 63 * KIB, 64 * KIB, 70 * KIB, 256 * KIB + 1, 390 * KIB))


@settings(max_examples=40)
@given(
    version=st.sampled_from((11, 12, 17)),
    answers=st.lists(st.lists(SIZES, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.sampled_from((1, 3, 50, 4 * KIB, 65 * KIB, 300 * KIB)), min_size=1, max_size=5).filter(
        lambda pieces: max(pieces) >= 4 * KIB
    ),
)
def test_answers_of_any_size_in_any_pieces_arrive(version: int, answers: list[list[int]], pieces: list[int]) -> None:
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(converse(version, answers, pieces))


async def test_the_bytes_of_a_broker_that_dies_within_an_answer_arrive() -> None:
    answer = frame(response(1, bytes(8) + RECORDS))
    async with exchange() as (_, proxy, client, upstream):
        await upstream.send_raw(answer[: 300 * KIB])
        await upstream.close()
        assert await client.ended() == answer[: 300 * KIB]
        assert (await proxy.closed_by("broker"))["broker"] == 1


async def test_a_broker_that_resets_within_an_answer_ends_the_client() -> None:
    async with exchange() as (_, proxy, client, upstream):
        await upstream.send_raw(frame(response(1, RECORDS))[: 300 * KIB])
        upstream.reset()
        await client.ended()
        await proxy.closed_by("broker")


async def test_what_a_client_left_behind_reaches_no_other() -> None:
    body = RECORDS * 40
    async with (
        exchange(receive_buffer_bytes=16 * KIB) as (broker, proxy, leaving, upstream),
        asyncio.TaskGroup() as tasks,
    ):
        sending = tasks.create_task(send_until_the_end(upstream, frame(response(1, b"\xee" * len(body)))))
        await proxy.reads_no_more_from("brokers")
        leaving.reset()
        await sending
        async with connected(proxy.port) as client:
            upstream = await forwarded(client, broker, request(OPAQUE, 4, 2))
            sending = tasks.create_task(upstream.send(response(2, body)))
            assert await client.receive() == response(2, body)
            await sending


async def send_until_the_end(wire: Wire, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        await wire.send_raw(data)
