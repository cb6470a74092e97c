"""The end of a connection to a broker, and the addresses that are tried before it is open."""

from __future__ import annotations

import asyncio

import pytest

from proxy.wire.exchange import BrokerGoneError, Exchange, Forward, Prepare, Respond
from proxy.wire.server import BrokerEndpoint
from proxy.wire.upstream import UpstreamConnection
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import connected, frame, request, response
from tests.support.proxy import proxy_harness
from tests.support.proxy.proxy_harness import (
    ForwardingHandler,
    forwarded,
    proxy_before,
    relayed,
)
from tests.support.servers.ports import free_ports

pytestmark = pytest.mark.usefixtures("every_relay")

OPAQUE, HANDLED, OTHER = 12, 1, 3
PATIENT = proxy_harness.PATIENT.model_copy(update={"half_close_timeout_ms": 60_000})


async def test_a_broker_that_leaves_ends_the_client_after_what_is_answered() -> None:
    gate = asyncio.Event()

    async def late(exchange: Exchange, held: memoryview) -> tuple[bytes, bytes]:
        await gate.wait()
        return bytes(held[:4]), b"late"

    async with relayed(handlers={HANDLED: ForwardingHandler(late)}) as (client, broker, _):
        upstream = await forwarded(client, broker, request(HANDLED, 4, 1), request(OPAQUE, 4, 2), request(OPAQUE, 4, 3))
        await upstream.send(response(1), response(2, b"second"))
        upstream.half_close()
        gate.set()
        assert await client.ended() == frame(response(1, b"late")) + frame(response(2, b"second"))


async def test_a_broker_that_just_joined_gets_the_bytes_that_waited() -> None:
    addresses: list[tuple[str, int]] = []
    looked_up = asyncio.Event()

    def resolve() -> list[tuple[str, int]]:
        looked_up.set()
        return addresses

    async with FakeBroker() as broker, proxy_before(broker) as proxy:
        _, port = proxy.server.listen("127.0.0.1", 0, BrokerEndpoint(2, resolve))
        async with connected(port) as client:
            await client.send(request(OPAQUE, 4, 1, b"x" * 1_000_000))
            await looked_up.wait()
            addresses += broker.addresses
            upstream = await broker.accepted()
            assert await upstream.receive() == request(OPAQUE, 4, 1, b"x" * 1_000_000)


async def test_the_next_address_is_tried_after_a_refusal() -> None:
    (refusing,) = free_ports(1)
    async with FakeBroker() as broker, proxy_before(broker) as proxy:
        addresses = [("127.0.0.1", refusing), *broker.addresses]
        _, port = proxy.server.listen("127.0.0.1", 0, BrokerEndpoint(None, lambda: addresses))
        async with connected(port) as client:
            await client.send(request(OPAQUE, 4, 1))
            upstream = await broker.accepted()
            assert await upstream.receive() == request(OPAQUE, 4, 1)
    assert proxy.metrics.upstream_connect_failures == 1


async def test_a_client_is_closed_when_every_address_has_refused_once(caplog: pytest.LogCaptureFixture) -> None:
    ports = free_ports(2)
    async with FakeBroker() as broker, proxy_before(broker, limits=PATIENT) as proxy:
        addresses = [("127.0.0.1", port) for port in ports]
        _, port = proxy.server.listen("127.0.0.1", 0, BrokerEndpoint(None, lambda: addresses))
        async with connected(port) as client:
            await client.send(request(OPAQUE, 4, 1))
            assert await client.ended() == b""
    assert proxy.metrics.upstream_connect_failures == 2
    (entry,) = proxy.server.errors.incidents
    assert (entry.kind, entry.reason) == ("closed", caplog.records[0].message)
    assert "broker unreachable" in caplog.records[0].message
    assert len(caplog.records) == 1


async def test_a_client_that_leaves_during_the_connect_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client's end cancels the opening. uvloop then closes the transport without a call of `connection_lost`."""
    made = UpstreamConnection.connection_made
    async with FakeBroker() as broker, proxy_before(broker) as proxy:

        def made_and_aborted(upstream: UpstreamConnection, transport: asyncio.BaseTransport) -> None:
            made(upstream, transport)
            (connection,) = proxy.server.connections
            connection.abort("client")

        monkeypatch.setattr(UpstreamConnection, "connection_made", made_and_aborted)
        async with connected(proxy.port) as client:
            await client.send(request(OPAQUE, 4, 1))
            await (await broker.accepted()).ended()


@pytest.mark.parametrize("prepares", [False, True])
async def test_a_handler_that_waits_for_a_broker_that_is_gone_ends(
    prepares: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(exchange: Exchange) -> bytes:
        asked = exchange.try_forward(request(OTHER, 4, 99))
        assert asked is not None
        return bytes(await asked)

    class AskingFirst:
        def on_request(self, exchange: Exchange) -> tuple[Prepare, Respond | None]:
            async def forward() -> Forward:
                return Forward(await ask(exchange))

            return Prepare(forward), lambda held: (bytes(held),)

    async def ask_later(exchange: Exchange, held: memoryview) -> tuple[bytes, ...]:
        return (await ask(exchange),)

    handlers = {HANDLED: AskingFirst() if prepares else ForwardingHandler(ask_later)}
    async with relayed(handlers=handlers) as (client, broker, proxy):
        await client.send(request(HANDLED, 4, 1))
        upstream = await broker.accepted()
        if not prepares:
            assert await upstream.receive() == request(HANDLED, 4, 1)
            await upstream.send(response(1))
        assert await upstream.receive() == request(OTHER, 4, 99)
        await upstream.close()
        assert await client.ended() == b""
        assert proxy.metrics.closed == {"broker": 1}
    assert caplog.records == []


async def test_an_answer_that_does_not_need_the_broker_leaves_after_the_broker() -> None:
    """A handler may catch the error, and answer with what it has."""

    async def ask(exchange: Exchange, held: memoryview) -> tuple[bytes, ...]:
        asked = exchange.try_forward(request(OTHER, 4, 99))
        assert asked is not None
        with pytest.raises(BrokerGoneError):
            await asked
        return (bytes(held),)

    async with relayed(handlers={HANDLED: ForwardingHandler(ask)}) as (client, broker, _):
        upstream = await forwarded(client, broker, request(HANDLED, 4, 1))
        await upstream.send(response(1, b"without more"))
        assert await upstream.receive() == request(OTHER, 4, 99)
        await upstream.close()
        assert await client.ended() == frame(response(1, b"without more"))


async def test_a_client_that_left_is_noticed_although_its_broker_hangs() -> None:
    """The proxy does not read from the client, because the broker answers none of its requests."""
    limits = PATIENT.model_copy(update={"max_in_flight": 1, "idle_timeout_ms": 500})
    async with FakeBroker() as broker, proxy_before(broker, limits=limits) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request(OPAQUE, 4, 1), request(OPAQUE, 4, 2))
            upstream = await broker.accepted()
            assert await upstream.receive() == request(OPAQUE, 4, 1)
        assert await proxy.closed_by("idle") == {"idle": 1}
        assert await upstream.ended() == b""
