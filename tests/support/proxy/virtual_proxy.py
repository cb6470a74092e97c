"""The connections of a proxy on a virtual network: everything of a process but its listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from proxy.config import LimitsConfig
from proxy.metrics import ProxyMetrics
from proxy.wire.admission import Admissions
from proxy.wire.connection import ClientConnection
from proxy.wire.context import ConnectionContext, ConnectionRegistry, Router
from proxy.wire.exchange import Handler, PrefixHandler
from proxy.wire.server import BrokerEndpoint
from tests.support.proxy.virtual_network import Peer, VirtualNetwork

Result = TypeVar("Result")


class VirtualProxy:
    def __init__(
        self,
        network: VirtualNetwork,
        tasks: asyncio.TaskGroup,
        *,
        handlers: Mapping[int, Handler] | None = None,
        prefix_handlers: Mapping[int, PrefixHandler] | None = None,
        limits: LimitsConfig | None = None,
    ) -> None:
        self.network = network
        self.metrics = ProxyMetrics()
        self.registry = ConnectionRegistry[ClientConnection]()
        self.limits = limits or LimitsConfig()
        self.admissions = Admissions(self.limits.max_connections, self.limits.max_connections_per_address)
        self.context = ConnectionContext(
            Router(handlers or {}, prefix_handlers or {}),
            self.limits,
            self.metrics,
            tasks.create_task,
            lambda: network.now_ms,
            self.admissions,
        )
        self._endpoint = BrokerEndpoint(1, lambda: [("192.0.2.9", 9092)])

    def connect(self) -> Peer:
        """Connects a client."""
        client = Peer()
        self.network.accept(ClientConnection(self.context, self._endpoint, self.registry), client)
        return client


def run_virtually(main: Callable[[VirtualNetwork], Awaitable[Result]]) -> Result:
    """Runs `main` in virtual time. Raises its error, or the first exception that escaped from a callback."""
    network = VirtualNetwork()

    async def run() -> Result:
        return await main(network)

    try:
        result = network.run_until_complete(run())
    finally:
        network.close()
    if network.defect is not None:
        raise network.defect
    return result
