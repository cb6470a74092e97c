"""A proxy before a fake broker, with handlers that the test scripts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Literal

from protocol.addresses import AddressOf
from protocol.primitives import INT32
from proxy.metrics import ProxyMetrics
from proxy.wire.context import DrainAnswer, Router
from proxy.wire.exchange import (
    Answer,
    Buffers,
    Exchange,
    Forward,
    Handler,
    PrefixHandler,
    Prepare,
    Respond,
    ResponsePatcher,
)
from proxy.wire.limits import Limits
from proxy.wire.server import BrokerEndpoint, Entrance, ProxyServer
from proxy.wire.socket_transport import PipePool
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import Wire, connected
from tiers.broker.tls import TlsContext

PATIENT = Limits(
    connection_setup_timeout_ms=60_000, connect_timeout_ms=60_000, connect_deadline_ms=60_000, drain_timeout_ms=60_000
)
"""An attempt at a broker that is given up late leaves the test a connection that nobody uses."""


RELAYS: Mapping[str, Callable[[], PipePool] | None] = {
    "spliced": lambda: PipePool(min_splice_bytes=1),
    "copied": lambda: PipePool(max_pipes=0),
    "by the loop": None,
}
"""How a proxy relays plain text. The product splices large answers, and copies small ones."""
relay: Callable[[], PipePool] | None = PipePool
"""How the proxies of this process relay, from their start on."""


@dataclass
class Proxy:
    server: ProxyServer
    port: int
    metrics: ProxyMetrics

    async def closed_by(self, cause: str, connections: int = 1) -> Mapping[str, int]:
        """Waits until so many connections have ended for this cause, and returns all causes.

        A client may see the end earlier."""
        async with asyncio.timeout(60):
            while self.metrics.closed[cause] < connections:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.001)
        return dict(self.metrics.closed)

    async def reads_no_more_from(self, peers: Literal["brokers", "clients"]) -> None:
        """Returns when the proxy has read nothing from them for a while."""
        before, still = -1, 0
        async with asyncio.timeout(60):
            while still < 20:
                await asyncio.sleep(0.005)
                now: int = getattr(self.metrics, f"bytes_from_{peers}")
                still = still + 1 if now == before else 0
                before = now


@contextlib.asynccontextmanager
async def proxy_before(
    broker: FakeBroker,
    *,
    handlers: Mapping[int, Handler] | None = None,
    prefix_handlers: Mapping[int, PrefixHandler] | None = None,
    limits: Limits | None = None,
    drain_answers: Mapping[int, DrainAnswer] | None = None,
    tls: TlsContext | None = None,
    upstream_tls: TlsContext | None = None,
    brokers_ask_for_sasl: bool = False,
    close_timeout_ms: int = 60_000,
    proxy_networks: Sequence[IPv4Network | IPv6Network] = (),
    address_of: AddressOf = lambda node_id: None,
) -> AsyncIterator[Proxy]:
    metrics = ProxyMetrics()
    server = ProxyServer(
        Router(handlers or {}, prefix_handlers or {}),
        limits or PATIENT,
        metrics,
        drain_answers=drain_answers,
        upstream_tls=upstream_tls,
        brokers_ask_for_sasl=brokers_ask_for_sasl,
        close_timeout_ms=close_timeout_ms,
        make_pipes=relay,
    )
    async with server:
        endpoint = BrokerEndpoint(1, lambda: broker.addresses, address_of)
        _, port = server.listen("127.0.0.1", 0, endpoint, Entrance(tls, proxy_networks))
        yield Proxy(server, port, metrics)


@contextlib.asynccontextmanager
async def relayed(*, receive_buffer_bytes: int = 0, **settings: Any) -> AsyncIterator[tuple[Wire, FakeBroker, Proxy]]:
    """Yields a client, its broker, and the proxy between them, with the settings of `proxy_before`."""
    async with (
        FakeBroker() as broker,
        proxy_before(broker, **settings) as proxy,
        connected(proxy.port, receive_buffer_bytes=receive_buffer_bytes) as client,
    ):
        yield client, broker, proxy


async def forwarded(client: Wire, broker: FakeBroker, *requests: bytes) -> Wire:
    """Sends the first requests of a client. Returns the connection on which the broker has received all of them."""
    await client.send(*requests)
    upstream = await broker.accepted()
    for _ in requests:
        await upstream.receive()
    return upstream


def reply(exchange: Exchange, body: bytes) -> Buffers:
    """An answer of a handler to this request."""
    return (INT32.pack(exchange.request.correlation_id), body)


@dataclass
class ScriptedState:
    """Notes that a request was abandoned."""

    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    times_abandoned: int = 0

    def on_abandoned(self) -> None:
        self.times_abandoned += 1
        self.abandoned.set()


@dataclass
class ForwardingHandler:
    """Forwards as it came; `answer(exchange, response)` makes the client's answer of a held response."""

    answer: Callable[[Exchange, memoryview], Buffers | Coroutine[None, None, Buffers]]
    hold_bytes: int | None = None
    patcher: Callable[[], ResponsePatcher] | None = None
    states: list[ScriptedState] = field(default_factory=list)

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        self.states.append(state := ScriptedState())
        exchange.on_abandoned = state.on_abandoned
        return Forward(exchange.request.frame, self.hold_bytes, self.patcher), partial(self.answer, exchange)


@dataclass
class AnsweringHandler:
    """Answers without the broker."""

    body: bytes

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        return Answer(reply(exchange, self.body)), None


@dataclass
class PreparingHandler:
    """Forwards `frame` once `gate` is open; the answer goes on as it is."""

    frame: bytes
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    states: list[ScriptedState] = field(default_factory=list)

    def on_request(self, exchange: Exchange) -> tuple[Prepare, Respond | None]:
        async def forward() -> Forward:
            self.asked.set()
            await self.gate.wait()
            return Forward(self.frame, hold_bytes=None)

        self.states.append(state := ScriptedState())
        exchange.on_abandoned = state.on_abandoned
        return Prepare(forward), lambda response: (bytes(response),)
