"""The limits of the number of connections, and of their silence."""

from __future__ import annotations

import pytest

from proxy.metrics import ProxyMetrics
from proxy.wire.admission import Admission, Limit
from proxy.wire.context import Router
from proxy.wire.limits import Limits
from proxy.wire.server import ProxyServer
from tests.support.fakes.broker.wire import OPAQUE, connected, request
from tests.support.proxy.proxy_harness import relayed


@pytest.mark.parametrize("limits", [{"max_connections": 1}, {"max_connections_per_address": 1}])
async def test_a_limit_of_connections_refuses_one_more(limits: dict[str, int]) -> None:
    async with relayed(limits=Limits(**limits)) as (client, broker, proxy):
        await client.send(request(OPAQUE, 4, 1))
        await broker.accepted()
        async with connected(proxy.port) as refused:
            assert await refused.ended() == b""
        assert (proxy.metrics.rejected.total(), proxy.metrics.open_connections) == (1, 1)


async def test_an_idle_connection_is_closed() -> None:
    limits = Limits(idle_timeout_ms=40)
    async with relayed(limits=limits) as (client, _, proxy):
        assert await client.ended() == b""
        assert proxy.metrics.closed == {"idle": 1}


@pytest.mark.parametrize(("asks_for_sasl", "places"), [(False, 2), (True, 8)])
async def test_one_address_keeps_a_quarter_of_the_places_without_sasl(asks_for_sasl: bool, places: int) -> None:
    """With SASL, a place is kept only by a client that the broker has authenticated."""
    server = ProxyServer(Router(), Limits(max_connections=8), ProxyMetrics(), brokers_ask_for_sasl=asks_for_sasl)
    async with server:
        admissions = server._context.admissions
        for _ in range(places):
            admitted = admissions.admit("192.0.2.1", lambda _: None)
            assert isinstance(admitted, Admission)
            admitted.prove()
        refused = admissions.admit("192.0.2.1", lambda _: None)
        assert refused == (Limit.CONNECTIONS if asks_for_sasl else Limit.PER_ADDRESS)
