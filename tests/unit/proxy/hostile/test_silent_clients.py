"""Connections that show no client keep no other client out, and end after a time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from protocol.primitives import INT32
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.sasl import authenticate, authenticate_answer, handshake, handshake_answer
from tests.support.fakes.broker.wire import OPAQUE, Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import PATIENT, Proxy, proxy_before
from tests.support.proxy.tls_sides import client_side, connected_by_tls, for_clients
from tests.support.servers.certificates import Authority

LIMIT = 50
SAID = [b"", b"\x00", INT32.pack(100), frame(request(OPAQUE, 4, 1, bytes(100)))[:-1]]
"""What a silent client sends: nothing, less than a head, a head, and less than a request."""


class AnsweringBroker(FakeBroker):
    """Answers every request that arrives whole."""

    async def serve(self, wire: Wire) -> None:
        while True:
            received = await wire.receive_when_it_comes()
            await wire.send(received[4:8])


async def is_served(client: Wire) -> bool:
    await client.send(request(OPAQUE, 4, 7))
    return await client.receive() == response(7)


@contextlib.asynccontextmanager
async def silent(proxy: Proxy, count: int) -> AsyncIterator[list[Wire]]:
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connected(proxy.port)) for _ in range(count)]
        for number, wire in enumerate(wires):
            with contextlib.suppress(ConnectionError):
                await wire.send_raw(SAID[number % len(SAID)])
        yield wires


async def test_a_producer_is_served_beside_more_silent_clients_than_the_limit() -> None:
    limits = PATIENT.model_copy(update={"max_connections": LIMIT, "max_connections_per_address": 0})
    async with (
        AnsweringBroker() as broker,
        proxy_before(broker, limits=limits) as proxy,
        silent(proxy, 3 * LIMIT),
        connected(proxy.port) as producer,
    ):
        assert await is_served(producer)
        async with silent(proxy, LIMIT):
            assert await is_served(producer)
        assert proxy.metrics.rejected.total() == 0
        assert proxy.server.open_connections <= LIMIT
        assert proxy.metrics.closed["gave_way"] > 0


@pytest.mark.parametrize("said", SAID, ids=["nothing", "a byte", "a head", "less than a request"])
async def test_a_silent_client_is_closed_after_a_time(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    limits = PATIENT.model_copy(update={"connection_setup_timeout_ms": 30})
    async with FakeBroker() as broker, proxy_before(broker, limits=limits) as proxy, connected(proxy.port) as client:
        with contextlib.suppress(ConnectionError):  # a busy machine may be late with this already
            await client.send_raw(said)
        assert await client.ended() == b""
        assert await proxy.closed_by("setup_timeout") == {"setup_timeout": 1}
    (line,) = caplog.records
    assert "the client has not shown who it is in time" in line.getMessage()
    assert line.__dict__["client"].startswith("127.0.0.1:")


async def test_the_time_includes_the_tls_handshake(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    limits = PATIENT.model_copy(update={"connection_setup_timeout_ms": 1_000})
    async with (
        FakeBroker() as broker,
        proxy_before(broker, limits=limits, tls=for_clients(authority)) as proxy,
        connected(proxy.port) as without_a_handshake,
        connected_by_tls(proxy.port, client_side(authority)) as without_a_request,
    ):
        assert await without_a_handshake.ended() == b""
        assert await without_a_request.ended() == b""
        assert await proxy.closed_by("setup_timeout", 2) == {"setup_timeout": 2}


async def test_a_client_that_was_served_may_be_silent() -> None:
    limits = PATIENT.model_copy(update={"connection_setup_timeout_ms": 1_000})
    async with (
        AnsweringBroker() as broker,
        proxy_before(broker, limits=limits) as proxy,
        connected(proxy.port) as client,
        connected(proxy.port) as later,
    ):
        assert await is_served(client)
        assert await later.ended() == b""
        assert await is_served(client)
        assert await proxy.closed_by("setup_timeout") == {"setup_timeout": 1}


async def authenticate_at(broker: FakeBroker, client: Wire, error_code: int) -> None:
    await client.send(handshake(1, "PLAIN"), authenticate(b"t"))
    upstream = await broker.accepted()
    for answer in (handshake_answer(), authenticate_answer(error_code=error_code)):
        await upstream.receive()
        await upstream.send(answer)
        assert await client.receive() == answer


async def test_with_sasl_a_client_is_unknown_until_it_has_authenticated() -> None:
    limits = PATIENT.model_copy(update={"max_connections": 2})
    async with (
        FakeBroker() as broker,
        proxy_before(broker, limits=limits, brokers_ask_for_sasl=True) as proxy,
        connected(proxy.port) as unknown,
        connected(proxy.port) as known,
    ):
        await authenticate_at(broker, unknown, ErrorCode.SASL_AUTHENTICATION_FAILED)
        await authenticate_at(broker, known, ErrorCode.NONE)
        async with connected(proxy.port) as newer, connected(proxy.port):
            assert await unknown.ended() == b""
            assert await newer.ended() == b""
            assert await proxy.closed_by("gave_way", 2) == {"gave_way": 2}
