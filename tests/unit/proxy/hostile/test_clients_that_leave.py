"""A connection that has ended frees its bytes at once. Its objects wait for the garbage collector, which comes late."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator, Mapping

import pytest

from protocol.primitives import INT32
from proxy.wire.exchange import Handler
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import connected, frame, request
from tests.support.proxy.proxy_harness import AnsweringHandler, ForwardingHandler, Proxy, forwarded, proxy_before
from tests.support.tiers.waiting import until

pytestmark = pytest.mark.usefixtures("every_relay")

ANSWERED, HELD = 40, 41
HANDLERS: Mapping[int, Handler] = {
    ANSWERED: AnsweringHandler(bytes(4096)),
    HELD: ForwardingHandler(lambda _, held: (bytes(held),)),
}
CLIENTS = 5
LARGE = bytes(900 * 1024)
PART = LARGE[: len(LARGE) // 2]


@pytest.fixture(autouse=True)
def _only_references_free() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


def traced_bytes() -> int:
    held_bytes, _ = tracemalloc.get_traced_memory()
    return held_bytes


async def until_read(proxy: Proxy, *, from_clients: int = 0, from_brokers: int = 0) -> None:
    metrics = proxy.metrics
    await until(lambda: metrics.bytes_from_clients >= from_clients and metrics.bytes_from_brokers >= from_brokers)


async def test_the_requests_that_waited_are_freed() -> None:
    one = frame(request(ANSWERED, 1, 7))
    waited_bytes = 0
    async with FakeBroker() as broker, proxy_before(broker, handlers=HANDLERS) as proxy:
        before = traced_bytes()
        for number in range(CLIENTS):
            async with connected(proxy.port, receive_buffer_bytes=16 * 1024) as client:
                sending = asyncio.create_task(client.send_raw(one * 50_000))
                await until(lambda: any(each.is_full for each in proxy.server.connections))
                waited_bytes = proxy.metrics.bytes_from_clients - proxy.metrics.requests[ANSWERED] * len(one)
                sending.cancel()
                await asyncio.wait([sending])
                client.reset()
            await proxy.closed_by("client", number + 1)
        assert traced_bytes() - before < waited_bytes / 2


@pytest.mark.parametrize("is_response", [False, True], ids=["request", "response"])
async def test_what_arrived_in_part_is_freed(is_response: bool) -> None:
    async with FakeBroker() as broker, proxy_before(broker, handlers=HANDLERS) as proxy:
        before = traced_bytes()
        for number in range(CLIENTS):
            async with connected(proxy.port) as client:
                arrived_bytes = (number + 1) * len(PART)
                if is_response:
                    upstream = await forwarded(client, broker, request(HELD, 1, 7))
                    await upstream.send_raw(INT32.pack(4 + len(LARGE)) + INT32.pack(7) + PART)
                    await until_read(proxy, from_brokers=arrived_bytes)
                else:
                    await client.send_raw(frame(request(HELD, 1, 7, LARGE))[: len(PART)])
                    await until_read(proxy, from_clients=arrived_bytes)
                client.reset()
            await proxy.closed_by("client", number + 1)
        assert traced_bytes() - before < CLIENTS * len(PART) / 2
