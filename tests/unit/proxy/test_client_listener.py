"""The TLS listener bounds the cost of strangers: endless, broken and very many handshakes.

`test_tls.py` tests what its clients see.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path

import pytest

from proxy.wire.connection import ClientConnection
from proxy.wire.limits import Limits
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, connected, request
from tests.support.proxy import proxy_harness
from tests.support.proxy.proxy_harness import RELAYS, Proxy, proxy_before
from tests.support.proxy.tls_sides import client_side, connected_by_tls, for_clients
from tests.support.servers.certificates import Authority
from tests.support.servers.stream_server import StreamServer
from tests.support.tiers.waiting import until


async def test_a_listener_may_be_closed_again(tmp_path: Path) -> None:
    async with FakeBroker() as broker, proxy_before(broker, tls=for_clients(Authority(tmp_path))) as proxy:
        proxy.server.stop_listening()
        # The second close must not touch the next owner of the descriptor's number.
        accepted = asyncio.Event()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            accepted.set()

        async with StreamServer(accept, port=proxy.port):
            proxy.server.stop_listening()
            _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            await accepted.wait()
            writer.close()
            await writer.wait_closed()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def client_hello(authority: Authority) -> bytes:
    outgoing = ssl.MemoryBIO()
    handshake = client_side(authority).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


async def is_served(proxy: Proxy, broker: FakeBroker, authority: Authority) -> bool:
    async with connected_by_tls(proxy.port, client_side(authority)) as wire:
        await wire.send(request(OPAQUE, 4, 1))
        return await (await broker.accepted()).receive() == request(OPAQUE, 4, 1)


async def test_a_failed_handshake_releases_its_place(authority: Authority) -> None:
    hello = client_hello(authority)
    limits = Limits(max_connections=1)
    async with FakeBroker() as broker, proxy_before(broker, tls=for_clients(authority), limits=limits) as proxy:
        for said in (
            os.urandom(4_000),
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\xff\xff" + os.urandom(2_000),
            hello[:5] + b"\x01\xff\xff\xff" + hello[9:],
            hello[:-20] + os.urandom(20),
            *(hello[:size] for size in (0, 3, 100)),
            hello,
        ):
            async with connected(proxy.port) as stranger:
                await stranger.send_raw(said)
                stranger.half_close()
                await stranger.ended()
        assert broker.connections_made == 0
        assert await is_served(proxy, broker, authority)
        assert proxy.metrics.rejected.total() == 0


async def test_half_a_handshake_has_a_deadline(authority: Authority) -> None:
    limits = Limits(connection_setup_timeout_ms=500, max_connections=2, max_connections_per_address=0)
    hello = client_hello(authority)
    async with FakeBroker() as broker, proxy_before(broker, tls=for_clients(authority), limits=limits) as proxy:
        for _ in range(2):  # in the released places
            async with connected(proxy.port) as one, connected(proxy.port) as other:
                with contextlib.suppress(ConnectionError):  # a busy machine may be late with this already
                    await one.send_raw(hello[:100])
                    await other.send_raw(hello)
                await one.ended()
                await other.ended()
        assert proxy.metrics.closed == {"setup_timeout": 4}
        assert proxy.metrics.rejected.total() == 0


async def test_hundreds_of_handshakes_hold_no_more_than_the_limit(authority: Authority) -> None:
    limits = Limits(max_connections=20, max_connections_per_address=0, connection_setup_timeout_ms=300_000)
    async with (
        FakeBroker() as broker,
        proxy_before(broker, tls=for_clients(authority), limits=limits) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(300):
            await stack.enter_async_context(connected(proxy.port))
        await until(lambda: proxy.metrics.closed["gave_way"] >= 280)
        assert proxy.metrics.closed == {"gave_way": 280}
        assert await is_served(proxy, broker, authority)
        assert proxy.metrics.rejected.total() == 0


async def test_connections_that_give_way_before_their_first_step_are_counted() -> None:
    limits = Limits(max_connections=1, connection_setup_timeout_ms=300_000)
    async with FakeBroker() as broker, proxy_before(broker, limits=limits) as proxy:
        # The loop does not turn meanwhile. Then it accepts all of them in one turn.
        strangers = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(5)]
        assert await proxy.closed_by("gave_way", 4) == {"gave_way": 4}
        for stranger in strangers:
            stranger.close()


async def test_a_stop_while_a_connection_is_opened_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener cancels its steps in progress. The event loop then closes the transport without a call."""
    made = ClientConnection.connection_made
    monkeypatch.setattr(proxy_harness, "relay", RELAYS["by the loop"])
    async with FakeBroker() as broker, proxy_before(broker) as proxy:

        def made_and_stopped(connection: ClientConnection, transport: asyncio.BaseTransport) -> None:
            made(connection, transport)
            proxy.server.stop_listening()

        monkeypatch.setattr(ClientConnection, "connection_made", made_and_stopped)
        async with connected(proxy.port) as client:
            assert await client.ended() == b""
        assert proxy.server.open_connections == 0
