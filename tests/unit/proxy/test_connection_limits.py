"""The limits of the number of connections, and of their silence."""

from __future__ import annotations

from proxy.config import LimitsConfig
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, connected, request
from tests.support.proxy.proxy_harness import proxy_before


async def test_the_connection_limit_refuses_one_more() -> None:
    limits = LimitsConfig(max_connections=1)
    async with FakeBroker() as broker, proxy_before(broker, limits=limits) as proxy, connected(proxy.port) as client:
        await client.send(request(OPAQUE, 4, 1))
        await broker.accepted()
        async with connected(proxy.port) as refused:
            assert await refused.ended() == b""
        assert proxy.metrics.rejected.total() == 1
        assert proxy.metrics.open_connections == 1


async def test_an_idle_connection_is_closed() -> None:
    limits = LimitsConfig(idle_timeout_ms=40)
    async with FakeBroker() as broker, proxy_before(broker, limits=limits) as proxy, connected(proxy.port) as client:
        assert await client.ended() == b""
        assert proxy.metrics.closed == {"idle": 1}


async def test_an_address_has_a_limit_of_its_own() -> None:
    limits = LimitsConfig(max_connections_per_address=1)
    async with FakeBroker() as broker, proxy_before(broker, limits=limits) as proxy, connected(proxy.port) as client:
        await client.send(request(OPAQUE, 4, 1))
        await broker.accepted()
        async with connected(proxy.port) as refused:
            assert await refused.ended() == b""
        assert proxy.metrics.rejected.total() == 1
