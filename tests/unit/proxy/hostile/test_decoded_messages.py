"""The memory for decoded messages is limited, whatever clients send before any right is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from protocol.api_keys import ApiKey
from proxy.wire import server
from proxy.wire.exchange import Answer, Buffers, Exchange, Handler, HandlerState, Prepare
from proxy.wire.hold_budget import DECODED_FACTOR, FLOOR_BYTES
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import Wire, connected, request, response
from tests.support.proxy.proxy_harness import PATIENT, AnsweringHandler, ForwardingHandler, proxy_before, reply

DECODED, ANSWERED = 41, 42
LARGE = bytes(100 * 1024)
LARGE_RESPONSE = bytes(DECODED_FACTOR * len(LARGE) // 2)
"""With its answer, it takes as much memory as a large request."""
AT_ONCE = 3
CLIENTS = 8
LIMITS = PATIENT.model_copy(update={"max_decoded_bytes": 2 * (AT_ONCE * DECODED_FACTOR * len(LARGE) + FLOOR_BYTES)})


@dataclass
class CountingHandler:
    """Answers when so many requests are decoded at once."""

    awaited: int
    decoded: int = 0
    most: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def on_request(self, exchange: Exchange) -> tuple[Prepare, HandlerState | None]:
        self.decoded += 1
        self.most = max(self.most, self.decoded)
        if self.decoded == self.awaited:
            self.reached.set()

        async def decide() -> Answer:
            await self.reached.wait()
            self.decoded -= 1
            return Answer(reply(exchange, b""))

        return Prepare(decide), None


async def test_large_requests_wait_for_the_memory_of_others() -> None:
    """All of them are answered in their turns, and a small one waits for none of them."""
    large = CountingHandler(AT_ONCE)
    handlers: Mapping[int, Handler] = {DECODED: large, ANSWERED: AnsweringHandler(b"")}
    async with FakeBroker() as broker, proxy_before(broker, handlers=handlers, limits=LIMITS) as proxy:

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
        assert large.most == AT_ONCE
        assert proxy.server._context.requests.reserved_bytes == 0


async def test_a_fetch_counts_as_decoded_when_its_handler_decodes_it() -> None:
    """Until then it counts as its bytes: it may wait for records for long."""
    fetch = request(ApiKey.FETCH, 4, 7, LARGE)
    counted: list[int] = []

    class Fetches:
        def on_request(self, exchange: Exchange) -> tuple[Answer, HandlerState | None]:
            counted.append(requests.reserved_bytes)
            exchange.count_decoded()
            counted.append(requests.reserved_bytes)
            return Answer(reply(exchange, b"")), None

    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={ApiKey.FETCH: Fetches()}, limits=LIMITS) as proxy,
        connected(proxy.port) as client,
    ):
        requests = proxy.server._context.requests
        await client.send(fetch)
        assert await client.receive() == response(7, b"")
        assert counted == [len(fetch), DECODED_FACTOR * len(fetch)]
        assert requests.reserved_bytes == 0


async def test_the_memory_of_a_client_that_left_is_free() -> None:
    large = CountingHandler(AT_ONCE + 1)
    async with FakeBroker() as broker, proxy_before(broker, handlers={DECODED: large}, limits=LIMITS) as proxy:
        for left in range(2 * AT_ONCE):
            async with connected(proxy.port) as client:
                await client.send_raw(b"".join((len(LARGE).to_bytes(4), request(DECODED, 1, 7, LARGE)[:1000])))
                while not proxy.server._context.requests.reserved_bytes:  # noqa: ASYNC110 - a counter has no event
                    await asyncio.sleep(0.001)
                client.reset()
            await proxy.closed_by("client", left + 1)
        assert proxy.server._context.requests.reserved_bytes == 0


class LargeAnswers(FakeBroker):
    """Answers each request with many bytes."""

    async def serve(self, wire: Wire) -> None:
        while True:
            asked = await wire.receive_when_it_comes()
            await wire.send(response(int.from_bytes(asked[4:8]), LARGE_RESPONSE))


async def test_large_responses_wait_for_the_memory_of_others() -> None:
    """All of them are answered in their turns, also two of one client. A small one waits for none of them."""
    count, most, reached = 0, 0, asyncio.Event()

    async def answer(exchange: Exchange, held: memoryview) -> Buffers:
        nonlocal count, most
        count += 1
        most = max(most, count)
        if count == AT_ONCE:
            reached.set()
        await reached.wait()
        count -= 1
        return (held,)

    handlers: Mapping[int, Handler] = {DECODED: ForwardingHandler(answer), ANSWERED: AnsweringHandler(b"")}
    async with LargeAnswers() as broker, proxy_before(broker, handlers=handlers, limits=LIMITS) as proxy:

        async def ask() -> None:
            async with connected(proxy.port) as client:
                await client.send(*(request(DECODED, 1, number) for number in range(2)))
                assert [await client.receive() for _ in range(2)] == [
                    response(number, LARGE_RESPONSE) for number in range(2)
                ]

        async with connected(proxy.port) as small, asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(ask())
            await reached.wait()
            await small.send(request(ANSWERED, 1, 7))
            assert await small.receive() == response(7, b"")
        assert most == AT_ONCE
        assert proxy.server._context.responses.reserved_bytes == 0


@pytest.mark.parametrize("leave", [Wire.reset, Wire.half_close])
async def test_a_client_that_leaves_frees_the_memory_of_its_response(leave: Callable[[Wire], None]) -> None:
    """Some clients leave while their responses wait for memory."""
    never = asyncio.Event()

    async def answer(exchange: Exchange, held: memoryview) -> Buffers:
        await never.wait()
        return (held,)

    limits = LIMITS.model_copy(update={"half_close_timeout_ms": 1})
    async with (
        LargeAnswers() as broker,
        proxy_before(broker, handlers={DECODED: ForwardingHandler(answer)}, limits=limits) as proxy,
    ):
        responses = proxy.server._context.responses
        for _ in range(CLIENTS):
            async with connected(proxy.port) as client:
                await client.send(request(DECODED, 1, 7))
                while not (responses.has_waiting or responses.reserved_bytes):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.001)
                leave(client)
        await proxy.closed_by("client" if leave is Wire.reset else "half_closed", CLIENTS)
        assert responses.reserved_bytes == 0
        assert not responses.has_waiting


async def test_a_slow_client_gives_way_to_a_response_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOKS_S", 0.01)
    monkeypatch.setattr(server, "GIVE_WAY_S", 0.01)
    huge = bytes(16 << 20)
    limits = LIMITS.model_copy(update={"max_decoded_bytes": len(huge)})
    handler = ForwardingHandler(
        lambda exchange, held: (held[:4], huge if exchange.request.correlation_id == 1 else LARGE_RESPONSE)
    )
    async with (
        LargeAnswers() as broker,
        proxy_before(broker, handlers={DECODED: handler}, limits=limits) as proxy,
        connected(proxy.port) as slow,
        connected(proxy.port) as honest,
    ):
        await slow.send(request(DECODED, 1, 1))
        while proxy.server._context.responses.reserved_bytes < len(huge):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        await honest.send(request(DECODED, 1, 2))
        assert await honest.receive() == response(2, LARGE_RESPONSE)
        await proxy.closed_by("stalled")
