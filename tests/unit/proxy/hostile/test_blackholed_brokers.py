"""A broker's machine that answers nothing holds up its own clients for a bounded time, and no other client."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from proxy.wire.context import Address
from proxy.wire.limits import Limits
from proxy.wire.server import BrokerEndpoint
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, Wire, connected, request, response
from tests.support.fakes.hanging_names import HANGING, hanging_names
from tests.support.proxy.proxy_harness import PATIENT, Proxy, proxy_before

LONG_MS = 600_000
"""Longer than any test waits."""
ASKED = request(OPAQUE, 4, 1)


@contextlib.contextmanager
def blackhole() -> Iterator[tuple[str, int]]:
    """Yields an address that answers no SYN: that of a listener whose backlog is full.

    A connect to it neither succeeds nor fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address: tuple[str, int] = listener.getsockname()
        with socket.create_connection(address):
            yield address


@contextlib.asynccontextmanager
async def client_of(proxy: Proxy, addresses: Sequence[Address]) -> AsyncIterator[Wire]:
    """Yields a client of a port that leads to `addresses`. The client has sent a request."""
    _, port = proxy.server.listen("127.0.0.1", 0, BrokerEndpoint(None, lambda: addresses))
    async with connected(port) as client:
        await client.send(ASKED)
        yield client


async def is_served(client: Wire, broker: FakeBroker) -> bool:
    upstream = await broker.accepted()
    assert await upstream.receive() == ASKED
    await upstream.send(response(1))
    return await client.receive() == response(1)


def timeouts(*, each_ms: int, together_ms: int) -> Limits:
    return PATIENT.model_copy(update={"connect_timeout_ms": each_ms, "connect_deadline_ms": together_ms})


async def test_a_client_of_a_blackholed_broker_is_closed_after_a_time() -> None:
    limits = timeouts(each_ms=20, together_ms=LONG_MS)
    with blackhole() as gone, blackhole() as also_gone:
        async with FakeBroker() as broker, proxy_before(broker, limits=limits) as proxy:
            async with client_of(proxy, [gone, also_gone]) as client:
                assert await client.ended() == b""
            assert await proxy.closed_by("upstream_unreachable") == {"upstream_unreachable": 1}
            assert proxy.metrics.upstream_connect_failures == 2


async def test_the_deadline_bounds_the_attempts_at_all_addresses_together() -> None:
    limits = timeouts(each_ms=LONG_MS, together_ms=50)
    with blackhole() as gone, blackhole() as also_gone, blackhole() as never_tried:
        async with FakeBroker() as broker, proxy_before(broker, limits=limits) as proxy:
            async with client_of(proxy, [gone, also_gone, never_tried]) as client:
                assert await client.ended() == b""
            assert await proxy.closed_by("upstream_unreachable") == {"upstream_unreachable": 1}
            assert proxy.metrics.upstream_connect_failures == 1


async def test_a_client_that_waits_for_a_blackholed_broker_delays_no_other() -> None:
    limits = timeouts(each_ms=LONG_MS, together_ms=LONG_MS)
    with blackhole() as gone:
        async with (
            FakeBroker() as broker,
            proxy_before(broker, limits=limits) as proxy,
            client_of(proxy, [gone]) as waiting,
            client_of(proxy, broker.addresses) as other,
        ):
            assert await is_served(other, broker)
            assert proxy.metrics.upstream_connect_failures == 0
            waiting.reset()


@pytest.mark.usefixtures("every_relay")
async def test_a_client_of_a_broker_whose_name_hangs_delays_no_other() -> None:
    limits = timeouts(each_ms=LONG_MS, together_ms=LONG_MS)
    with hanging_names() as names:
        async with (
            FakeBroker() as broker,
            proxy_before(broker, limits=limits) as proxy,
            client_of(proxy, [(f"1.{HANGING}", 9092)]) as waiting,
            client_of(proxy, [(f"2.{HANGING}", 9092)]) as also_waiting,
        ):
            await names.hang(2)
            async with client_of(proxy, broker.addresses) as other:
                assert await is_served(other, broker)
            waiting.reset()
            also_waiting.reset()


async def test_an_address_that_failed_is_tried_last_until_it_answers() -> None:
    async with FakeBroker() as first, FakeBroker() as second, proxy_before(first) as proxy:
        addresses = [*first.addresses, *second.addresses]
        await first.stop()
        for _ in range(3):
            async with client_of(proxy, addresses) as client:
                assert await is_served(client, second)
        assert proxy.metrics.upstream_connect_failures == 1
        await first.start()
        for the_first in (first.addresses, addresses):
            async with client_of(proxy, the_first) as client:
                assert await is_served(client, first)
