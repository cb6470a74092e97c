"""The memory for messages that are held or decoded is limited, whatever clients send before any right is checked."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from protocol.api_keys import ApiKey
from protocol.primitives import INT32
from proxy.handlers.guards import own_ids_guards
from proxy.wire import server
from proxy.wire.exchange import Answer, Buffers, Exchange, Handler, Prepare, Respond
from proxy.wire.flow_control import READ_BUFFER_BYTES
from proxy.wire.limits import Limits
from proxy.wire.memory import DECODED_FACTOR, FLOOR_BYTES, MessageBudget
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import (
    PATIENT,
    AnsweringHandler,
    ForwardingHandler,
    Proxy,
    proxy_before,
    reply,
)
from tests.support.proxy.virtual_network import VirtualNetwork
from tests.support.proxy.virtual_proxy import VirtualProxy, run_virtually

DECODED, ANSWERED = 41, 42
LARGE = bytes(100 * 1024)
LARGE_RESPONSE = bytes(DECODED_FACTOR * len(LARGE))
CLIENTS = 12


def limits_of(at_once: int) -> Limits:
    """Returns limits with which so many large requests, or large responses, are in memory at once."""
    frame_bytes = len(request(DECODED, 1, 0, LARGE))
    return PATIENT.model_copy(update={"max_decoded_bytes": 4 * at_once * DECODED_FACTOR * frame_bytes})


AT_ONCE = {"large": 8, "huge": 1}
"""A message above an eighth of the memory is huge. Huge ones take turns."""


async def reserved(budget: MessageBudget, size_bytes: int = 1) -> None:
    while budget.reserved_bytes < size_bytes:  # noqa: ASYNC110 - a budget has no event
        await asyncio.sleep(0.001)


def nothing_left(proxy: Proxy) -> bool:
    context = proxy.server._context
    budgets = (context.arriving, context.requests, context.responses)
    return not any(budget.reserved_bytes or budget.has_waiting for budget in budgets)


@dataclass
class CountingHandler:
    """Answers when so many requests are decoded at once."""

    awaited: int
    decoded: int = 0
    most: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def on_request(self, exchange: Exchange) -> tuple[Prepare, Respond | None]:
        self.decoded += 1
        self.most = max(self.most, self.decoded)
        if self.decoded == self.awaited:
            self.reached.set()

        async def decide() -> Answer:
            await self.reached.wait()
            self.decoded -= 1
            return Answer(reply(exchange, b""))

        return Prepare(decide), None


class LargeAnswers(FakeBroker):
    """Answers each request with many bytes."""

    async def serve(self, wire: Wire) -> None:
        while True:
            asked = await wire.receive_when_it_comes()
            await wire.send(response(INT32.unpack_from(asked, 4)[0], LARGE_RESPONSE))


# Requests


@pytest.mark.parametrize("size", AT_ONCE)
async def test_large_requests_wait_for_the_memory_of_others(size: str) -> None:
    """All of them are answered in their turns, and a small one waits for none of them."""
    large = CountingHandler(AT_ONCE[size])
    handlers: Mapping[int, Handler] = {DECODED: large, ANSWERED: AnsweringHandler(b"")}
    limits = limits_of(AT_ONCE[size])
    async with FakeBroker() as broker, proxy_before(broker, handlers=handlers, limits=limits) as proxy:

        async def ask() -> None:
            async with connected(proxy.port) as client:
                await client.send(*(request(DECODED, 1, number, LARGE) for number in range(2)))
                assert [await client.receive() for _ in range(2)] == [response(number, b"") for number in range(2)]

        async with connected(proxy.port) as small, asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(ask())
            await large.reached.wait()
            await small.send(request(ANSWERED, 1, 7))
            assert await small.receive() == response(7, b"")
        assert large.most == AT_ONCE[size]
        assert nothing_left(proxy)


async def test_a_huge_request_delays_no_large_one() -> None:
    waiting = CountingHandler(2)
    handlers: Mapping[int, Handler] = {DECODED: waiting, ANSWERED: AnsweringHandler(b"")}
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers=handlers, limits=limits_of(1)) as proxy,
        connected(proxy.port) as huge,
        connected(proxy.port) as large,
    ):
        await huge.send(request(DECODED, 1, 1, LARGE))
        await reserved(proxy.server._context.requests)
        await large.send(request(ANSWERED, 1, 2, bytes(len(LARGE) // 9)))
        assert await large.receive() == response(2, b"")


async def test_a_request_that_has_not_arrived_takes_no_memory_for_its_decoding() -> None:
    """A client sends the head of a large request alone."""
    handlers: Mapping[int, Handler] = {DECODED: AnsweringHandler(b"")}
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers=handlers, limits=limits_of(1)) as proxy,
        connected(proxy.port) as silent,
        connected(proxy.port) as honest,
    ):
        await silent.send(request(DECODED, 1, 1))
        assert await silent.receive() == response(1, b"")
        await silent.send_raw(INT32.pack(4 * FLOOR_BYTES) + request(DECODED, 1, 2))
        await reserved(proxy.server._context.arriving)
        await honest.send(request(DECODED, 1, 3, LARGE))
        assert await honest.receive() == response(3, b"")


async def test_a_large_request_is_decoded_when_those_before_it_are_answered() -> None:
    """The broker answers them in this order too, and may let the first one wait for records."""
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={DECODED: AnsweringHandler(b"")}, limits=limits_of(1)) as proxy,
        connected(proxy.port) as client,
        connected(proxy.port) as honest,
    ):
        await client.send(request(OPAQUE, 1, 1), request(DECODED, 1, 2, LARGE))
        upstream = await broker.accepted()
        await upstream.receive()
        await honest.send(request(DECODED, 1, 3, LARGE))
        assert await honest.receive() == response(3, b"")
        await upstream.send(response(1))
        assert [await client.receive() for _ in range(2)] == [response(1), response(2, b"")]
        assert nothing_left(proxy)


@pytest.mark.parametrize("size", [10_000, 90_000])
async def test_a_large_request_goes_on_behind_an_answer_of_the_proxy(size: int) -> None:
    """The answer leaves in the same turn in which the large request has to wait for it."""
    handlers: Mapping[int, Handler] = {
        ANSWERED: AnsweringHandler(b""),
        DECODED: ForwardingHandler(lambda exchange, held: (held,)),
    }
    async with (
        LargeAnswers() as broker,
        proxy_before(broker, handlers=handlers) as proxy,
        connected(proxy.port) as client,
    ):
        sizes = (10_000, size, 10)
        await client.send(*(request(ANSWERED, 1, number, bytes(each)) for number, each in enumerate(sizes)))
        await client.send(request(DECODED, 1, 3, bytes(size)))
        assert [await client.receive() for _ in sizes] == [response(number, b"") for number in range(3)]
        assert await client.receive() == response(3, LARGE_RESPONSE)


async def test_a_fetch_counts_as_decoded_when_its_handler_decodes_it() -> None:
    """Until then it counts as its bytes: it may wait for records for long."""
    fetch = request(ApiKey.FETCH, 4, 7, bytes(2 * FLOOR_BYTES))
    counted: list[int] = []

    class Fetches:
        def on_request(self, exchange: Exchange) -> tuple[Answer, Respond | None]:
            counted.append(requests.reserved_bytes)
            exchange.count_decoded()
            counted.append(requests.reserved_bytes)
            return Answer(reply(exchange, b"")), None

    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={ApiKey.FETCH: Fetches()}) as proxy,
        connected(proxy.port) as client,
    ):
        requests = proxy.server._context.requests
        await client.send(fetch)
        assert await client.receive() == response(7, b"")
        assert counted == [len(fetch), DECODED_FACTOR * len(fetch)]
        assert nothing_left(proxy)


async def test_the_memory_of_a_client_that_left_is_free() -> None:
    waiting = CountingHandler(CLIENTS)
    async with FakeBroker() as broker, proxy_before(broker, handlers={DECODED: waiting}, limits=limits_of(8)) as proxy:
        context = proxy.server._context
        for left in range(4):
            whole = request(DECODED, 1, 7, bytes(2 * FLOOR_BYTES))
            async with connected(proxy.port) as sending, connected(proxy.port) as waiting_client:
                await sending.send(request(OPAQUE, 1, 1))
                await sending.send_raw(INT32.pack(len(whole)) + whole[:1000])
                await waiting_client.send(request(DECODED, 1, 7, LARGE))
                await reserved(context.arriving)
                await reserved(context.requests)
                sending.reset()
                waiting_client.reset()
            await proxy.closed_by("client", 2 * left + 2)
        assert nothing_left(proxy)


def test_no_request_is_refused_while_a_client_does_not_read() -> None:
    """A request may name the owners' ids and 10,000 partitions, and the proxy answers for each."""
    handlers, guards = own_ids_guards("own")
    partitions = struct.pack(">h5sqhih1si", 5, b"own-1", 1, 0, 1, 1, b"t", 10_000) + bytes(40_000)
    requests = [request(ApiKey.ADD_PARTITIONS_TO_TXN, 0, number, partitions) for number in range(100)]

    async def main(network: VirtualNetwork) -> None:
        async with asyncio.TaskGroup() as tasks:
            proxy = VirtualProxy(network, tasks, handlers=handlers, prefix_handlers=guards)
            client = proxy.connect()
            client.stall()
            client.send(b"".join(map(frame, requests)))
            await asyncio.sleep(60)
            (connection,) = proxy.registry
            assert len(connection.queue.slots) <= READ_BUFFER_BYTES // len(partitions) + 1
            client.resume()
            await asyncio.sleep(60)
            assert len(client.received) > len(requests) * len(partitions)
            client.half_close()

    run_virtually(main)


# Responses


@pytest.mark.parametrize("size", AT_ONCE)
async def test_large_responses_wait_for_the_memory_of_others(size: str) -> None:
    """All of them are answered in their turns, also two of one client. A small one waits for none of them."""
    count, most, reached = 0, 0, asyncio.Event()

    async def answer(exchange: Exchange, held: memoryview) -> Buffers:
        nonlocal count, most
        count += 1
        most = max(most, count)
        if count == AT_ONCE[size]:
            reached.set()
        await reached.wait()
        count -= 1
        return (held,)

    handlers: Mapping[int, Handler] = {DECODED: ForwardingHandler(answer), ANSWERED: AnsweringHandler(b"")}
    limits = limits_of(AT_ONCE[size])
    async with LargeAnswers() as broker, proxy_before(broker, handlers=handlers, limits=limits) as proxy:

        async def ask() -> None:
            async with connected(proxy.port) as client:
                await client.send(*(request(DECODED, 1, number) for number in range(2)))
                expected = [response(number, LARGE_RESPONSE) for number in range(2)]
                assert [await client.receive() for _ in range(2)] == expected

        async with connected(proxy.port) as small, asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(ask())
            await reached.wait()
            await small.send(request(ANSWERED, 1, 7))
            assert await small.receive() == response(7, b"")
        assert most == AT_ONCE[size]
        assert nothing_left(proxy)


@pytest.mark.parametrize("leave", [Wire.reset, Wire.half_close])
async def test_a_client_that_leaves_frees_the_memory_of_its_response(leave: Callable[[Wire], None]) -> None:
    """Some clients leave while their responses wait for memory."""
    never = asyncio.Event()

    async def answer(exchange: Exchange, held: memoryview) -> Buffers:
        await never.wait()
        return (held,)

    limits = limits_of(8).model_copy(update={"half_close_timeout_ms": 1})
    handlers = {DECODED: ForwardingHandler(answer)}
    async with LargeAnswers() as broker, proxy_before(broker, handlers=handlers, limits=limits) as proxy:
        responses = proxy.server._context.responses
        for _ in range(CLIENTS):
            async with connected(proxy.port) as client:
                await client.send(request(DECODED, 1, 7))
                while not (responses.has_waiting or responses.reserved_bytes):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.001)
                leave(client)
        await proxy.closed_by("client" if leave is Wire.reset else "half_closed", CLIENTS)
        assert nothing_left(proxy)


async def test_a_large_answer_to_a_small_response_counts_until_it_is_sent() -> None:
    huge = bytes(16 << 20)
    handler = ForwardingHandler(lambda exchange, held: (held, huge))
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={DECODED: handler}) as proxy,
        connected(proxy.port, receive_buffer_bytes=16384) as client,
    ):
        await client.send(request(DECODED, 1, 1))
        upstream = await broker.accepted()
        await upstream.receive()
        await upstream.send(response(1))
        await reserved(proxy.server._context.responses, len(huge))
        assert await client.receive() == response(1, huge)
        await client.send(request(DECODED, 1, 2))
        await upstream.receive()
        assert nothing_left(proxy)


# Slow clients


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOKS_S", "GIVE_WAY_S", "ANSWERED_S"):
        monkeypatch.setattr(server, name, 0.01)


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_does_not_receive_gives_way() -> None:
    huge = bytes(16 << 20)
    handler = ForwardingHandler(
        lambda exchange, held: (held[:4], huge if exchange.request.correlation_id == 1 else LARGE_RESPONSE)
    )
    async with (
        LargeAnswers() as broker,
        proxy_before(broker, handlers={DECODED: handler}, limits=limits_of(1)) as proxy,
        connected(proxy.port) as slow,
        connected(proxy.port) as honest,
    ):
        await slow.send(request(DECODED, 1, 1))
        await reserved(proxy.server._context.responses, len(huge))
        await honest.send(request(DECODED, 1, 2))
        assert await honest.receive() == response(2, LARGE_RESPONSE)
        await proxy.closed_by("stalled")


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_does_not_send_its_request_gives_way() -> None:
    whole = request(DECODED, 1, 2, bytes(3 * FLOOR_BYTES))
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={DECODED: AnsweringHandler(b"")}, limits=limits_of(1)) as proxy,
        connected(proxy.port) as slow,
        connected(proxy.port) as honest,
    ):
        await slow.send(request(OPAQUE, 1, 1))
        await slow.send_raw(INT32.pack(len(whole)) + whole[:1000])
        await reserved(proxy.server._context.arriving)
        await honest.send(request(OPAQUE, 1, 1))
        await honest.send_raw(INT32.pack(len(whole)) + whole[:1000])
        await proxy.closed_by("stalled")
        await honest.send_raw(whole[1000:])
        for upstream in (await broker.accepted(), await broker.accepted()):
            await upstream.send(response(1))
        assert [await honest.receive() for _ in range(2)] == [response(1), response(2, b"")]


@pytest.mark.usefixtures("impatient")
async def test_a_request_that_its_broker_does_not_answer_gives_way() -> None:
    handler = ForwardingHandler(lambda exchange, held: (held,))
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={DECODED: handler}, limits=limits_of(1)) as proxy,
        connected(proxy.port) as waiting,
        connected(proxy.port) as honest,
    ):
        await waiting.send(request(DECODED, 1, 1, LARGE))
        await broker.accepted()
        await reserved(proxy.server._context.requests)
        await honest.send(request(DECODED, 1, 2, LARGE))
        await proxy.closed_by("stalled")
        upstream = await broker.accepted()
        await upstream.receive()
        await upstream.send(response(2))
        assert await honest.receive() == response(2)
