"""A client that does not receive its responses is closed; a client that is only slow is not."""

from __future__ import annotations

import asyncio
import logging

import pytest

from protocol.primitives import INT32
from proxy.wire.flow_control import READ_BUFFER_BYTES
from proxy.wire.limits import Limits
from tests.support.fakes.broker.wire import frame, request, response
from tests.support.proxy.proxy_harness import ForwardingHandler
from tests.support.proxy.virtual_network import Peer, VirtualNetwork
from tests.support.proxy.virtual_proxy import VirtualProxy, run_virtually

TIMEOUT_S = 300
BODY = bytes(4 * READ_BUFFER_BYTES)


async def stalled_client(
    network: VirtualNetwork, tasks: asyncio.TaskGroup, max_in_flight: int = 256
) -> tuple[VirtualProxy, Peer]:
    """Returns a client that has asked for a large response and does not read it."""
    handler = ForwardingHandler(lambda exchange, held: (bytes(held[:4]), BODY))
    limits = Limits(send_timeout_ms=TIMEOUT_S * 1000, max_in_flight=max_in_flight)
    proxy = VirtualProxy(network, tasks, handlers={1: handler}, limits=limits)
    client = proxy.connect()
    client.stall()
    client.send(frame(request(1, 4, 1)))
    await asyncio.sleep(1)
    network.brokers[0].send(frame(response(1)))
    await asyncio.sleep(1)
    return proxy, client


async def read_slowly(client: Peer) -> None:
    """Reads a buffer's worth, just in time."""
    for _ in range(READ_BUFFER_BYTES // 8192):
        client.read()
        await asyncio.sleep((TIMEOUT_S - 10) / (READ_BUFFER_BYTES // 8192))


def test_a_client_that_receives_nothing_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def main(network: VirtualNetwork) -> None:
        async with asyncio.TaskGroup() as tasks:
            proxy, client = await stalled_client(network, tasks)
            await asyncio.sleep(TIMEOUT_S - 10)
            assert len(proxy.registry) == 1
            client.read(READ_BUFFER_BYTES // 40)  # too little to count as progress
            await asyncio.sleep(20)
            assert len(proxy.registry) == 0
            assert proxy.metrics.closed == {"stalled": 1}

    with caplog.at_level(logging.WARNING):
        run_virtually(main)
    assert "the client does not receive its responses" in caplog.text


def test_a_client_that_receives_slowly_stays() -> None:
    async def main(network: VirtualNetwork) -> None:
        async with asyncio.TaskGroup() as tasks:
            proxy, client = await stalled_client(network, tasks)
            size_bytes = len(frame(response(1, BODY)))
            while len(client.received) < size_bytes:
                await read_slowly(client)
            assert client.received == INT32.pack(len(BODY) + 4) + response(1, BODY)
            await asyncio.sleep(2 * TIMEOUT_S)
            assert len(proxy.registry) == 1
            client.half_close()
            await asyncio.sleep(1)
            assert len(proxy.registry) == 0

    run_virtually(main)


def test_a_client_that_receives_slowly_is_not_idle() -> None:
    """The proxy reads no request from it meanwhile, but bytes move."""

    async def main(network: VirtualNetwork) -> None:
        async with asyncio.TaskGroup() as tasks:
            proxy, client = await stalled_client(network, tasks, max_in_flight=1)
            client.send(frame(request(1, 4, 2)) + frame(request(1, 4, 3)))
            await asyncio.sleep(1)
            (connection,) = proxy.registry
            for _ in range(3):
                await read_slowly(client)
                connection.close_idle(TIMEOUT_S)
            client.resume()
            connection.close_idle(TIMEOUT_S)
            await asyncio.sleep(1)
            assert len(client.received) == len(frame(response(1, BODY)))
            await asyncio.sleep(TIMEOUT_S)
            connection.close_idle(TIMEOUT_S)  # the broker does not answer the second request
            await asyncio.sleep(1)
            assert proxy.metrics.closed == {"idle": 1}

    run_virtually(main)
