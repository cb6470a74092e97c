"""A stop ends, and leaves no connection to a client or to a broker, whatever their states are.

The order of the steps is that of a seed. Turns of the loop are the only pauses, so a stop meets the states that last
for one turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from random import Random

import pytest

from protocol.primitives import INT32
from proxy.wire.context import Address
from proxy.wire.exchange import Buffers, Exchange
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.sasl import authenticate, handshake
from tests.support.fakes.broker.wire import OPAQUE, TIMEOUT_S, Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import PATIENT, ForwardingHandler, PreparingHandler, proxy_before
from tests.support.proxy.tls_sides import broker_side, client_side, connected_by_tls, for_brokers, for_clients
from tests.support.servers.certificates import Authority
from tiers.broker.tls import TlsContext

HELD, ASKING, PREPARED, STREAMED = 41, 42, 43, 44
SEEDS = range(60)
CLIENTS = 12
LOST = (OSError, asyncio.IncompleteReadError, RuntimeError)
"""What a client or a broker sees of a connection that the proxy ends. uvloop raises RuntimeError for a late write."""


@dataclass(frozen=True)
class Sides:
    """The TLS contexts."""

    client: ssl.SSLContext
    listener: TlsContext
    upstream: TlsContext
    broker: ssl.SSLContext


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    return Sides(client_side(authority), for_clients(authority), for_brokers(ca=authority.ca), broker_side(authority))


class UnsteadyBroker(FakeBroker):
    """Answers some requests of each connection. Then it hangs, leaves, half-closes or resets the connection."""

    def __init__(self, random: Random, tls: ssl.SSLContext | None, silent: Sequence[Address]) -> None:
        """`silent` are addresses of the broker that accept no connection."""
        super().__init__(tls)
        self._random = random
        self._silent = silent
        self._proxy_has_stopped = asyncio.Event()
        self._ends: list[asyncio.Future[None]] = []

    @property
    def addresses(self) -> list[Address]:
        return [*self._silent, *super().addresses]

    async def serve(self, wire: Wire) -> None:
        end = asyncio.get_running_loop().create_future()
        self._ends.append(end)
        with contextlib.suppress(*LOST):
            await self._answer_some(wire)
        try:
            await wire.ended()
        finally:
            end.set_result(None)

    async def _answer_some(self, wire: Wire) -> None:
        end = self._random.choice(("hang", "read", "close", "half-close", "reset"))
        for _ in range(self._random.randrange(6)):
            asked = await wire.receive_when_it_comes()
            body = bytes(self._random.choice((4, 300_000)) if asked[:2] == bytes((0, STREAMED)) else 12)
            await wire.send(response(INT32.unpack_from(asked, 4)[0], body))
        match end:
            case "hang":
                await self._proxy_has_stopped.wait()
            case "close":
                await wire.close()
            case "half-close":
                with contextlib.suppress(NotImplementedError):  # TLS has no half-closed connections
                    wire.half_close()
            case "reset":
                wire.reset()

    async def all_ended(self) -> None:
        """Waits until the stopped proxy has ended each of its connections."""
        self._proxy_has_stopped.set()
        await asyncio.gather(*self._ends)


def handlers() -> dict[int, ForwardingHandler | PreparingHandler]:
    async def never(exchange: Exchange, held: memoryview) -> Buffers:
        await asyncio.Event().wait()
        return ()

    async def ask(exchange: Exchange, held: memoryview) -> Buffers:
        asked = exchange.try_forward(request(OPAQUE, 4, 99))
        return (bytes(held[:4]), b"" if asked is None else bytes((await asked)[4:]))

    return {
        HELD: ForwardingHandler(never),
        ASKING: ForwardingHandler(ask),
        PREPARED: PreparingHandler(request(OPAQUE, 4, 1)),
        STREAMED: ForwardingHandler(ask, hold_bytes=100),
    }


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def live(random: Random, port: int, tls: ssl.SSLContext | None) -> None:
    """One client: it connects, sends requests whole or in part, and may leave. In the end it waits for its end."""
    await turns(random.randrange(20))
    with contextlib.suppress(*LOST):
        async with connected(port, receive_buffer_bytes=4096) if tls is None else connected_by_tls(port, tls) as wire:
            for number in range(random.randrange(6)):
                kind = random.choice((OPAQUE, OPAQUE, HELD, ASKING, PREPARED, STREAMED, STREAMED))
                sasl = random.choice((handshake(1, "PLAIN"), authenticate(b"token")))
                sent = frame(random.choice((request(kind, 4, number), request(kind, 4, number), sasl)))
                await wire.send_raw(sent)
                await turns(random.randrange(20))
            match random.randrange(6):
                case 0:
                    wire.abort()
                case 1 if tls is None:
                    wire.half_close()
                case 2:
                    await wire.receive()
                case 3:
                    await wire.send_raw(frame(request(STREAMED, 4, 9))[:-1])
            await wire.ended()


@contextlib.asynccontextmanager
async def unreachable() -> AsyncIterator[tuple[str, int]]:
    """Yields an address that neither accepts nor refuses a connection, because its backlog is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_stop_at_any_point_ends_all_connections(seed: int, sides: Sides) -> None:
    random = Random(seed)
    has_tls, brokers_have_tls = random.randrange(2), random.randrange(2)
    broker_tls = sides.broker if brokers_have_tls else None
    limits = PATIENT.model_copy(
        update={"max_connections": random.choice((0, 0, 5)), "max_in_flight": random.choice((1, 256))}
    )
    async with (
        asyncio.timeout(TIMEOUT_S),
        unreachable() as silent,
        UnsteadyBroker(random, broker_tls, random.choice(((), (), (silent,)))) as broker,
        asyncio.TaskGroup() as clients,
    ):
        async with proxy_before(
            broker,
            handlers=handlers(),
            limits=limits,
            tls=sides.listener if has_tls else None,
            upstream_tls=sides.upstream if brokers_have_tls else None,
            brokers_ask_for_sasl=random.randrange(4) == 0,
        ) as proxy:
            for _ in range(CLIENTS):
                speaks_tls = bool(has_tls) == bool(random.randrange(8))
                clients.create_task(live(random, proxy.port, sides.client if speaks_tls else None))
            await turns(random.randrange(80))
            if random.randrange(2):
                await proxy.server.drain(random.choice((0, 1, 20)))
        assert proxy.server.open_connections == proxy.metrics.open_connections == 0
        await broker.all_ended()
