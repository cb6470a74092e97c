"""The memory for decoded requests is limited, whatever clients send before any right is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.wire.exchange import Answer, Exchange, Handler, HandlerState, Prepare
from proxy.wire.hold_budget import FLOOR_BYTES
from proxy.wire.request_reader import DECODED_FACTOR
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import connected, request, response
from tests.support.proxy.proxy_harness import PATIENT, AnsweringHandler, proxy_before, reply

DECODED, ANSWERED = 41, 42
LARGE = bytes(100 * 1024)
AT_ONCE = 3
CLIENTS = 8
LIMITS = PATIENT.model_copy(update={"max_decoded_request_bytes": AT_ONCE * DECODED_FACTOR * len(LARGE) + FLOOR_BYTES})


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
        assert proxy.server._context.decoded.reserved_bytes == 0


async def test_the_memory_of_a_client_that_left_is_free() -> None:
    large = CountingHandler(AT_ONCE + 1)
    async with FakeBroker() as broker, proxy_before(broker, handlers={DECODED: large}, limits=LIMITS) as proxy:
        for left in range(2 * AT_ONCE):
            async with connected(proxy.port) as client:
                await client.send_raw(b"".join((len(LARGE).to_bytes(4), request(DECODED, 1, 7, LARGE)[:1000])))
                while not proxy.server._context.decoded.reserved_bytes:  # noqa: ASYNC110 - a counter has no event
                    await asyncio.sleep(0.001)
                client.reset()
            await proxy.closed_by("client", left + 1)
        assert proxy.server._context.decoded.reserved_bytes == 0
