"""The connections of a proxy on a virtual network: everything of a process but its listeners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from proxy.metrics import ProxyMetrics
from proxy.wire.admission import Admission, Admissions
from proxy.wire.connection import ClientConnection
from proxy.wire.connection_log import ConnectionLog
from proxy.wire.context import ConnectionContext, ConnectionRegistry, Router
from proxy.wire.exchange import Handler, PrefixHandler
from proxy.wire.limits import Limits
from proxy.wire.server import BrokerEndpoint
from tests.support.proxy.virtual_network import Peer, VirtualNetwork

Result = TypeVar("Result")

CLIENT_ADDRESS = ("192.0.2.1", 40000)


class VirtualProxy:
    def __init__(
        self,
        network: VirtualNetwork,
        tasks: asyncio.TaskGroup,
        *,
        handlers: Mapping[int, Handler] | None = None,
        prefix_handlers: Mapping[int, PrefixHandler] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.network = network
        self.metrics = ProxyMetrics()
        self.registry = ConnectionRegistry[ClientConnection]()
        self.limits = limits or Limits()
        self.admissions = Admissions(
            self.limits.max_connections,
            self.limits.max_connections_per_address or 0,
            self.limits.max_unauthenticated_connections_per_address,
            self.limits.connection_setup_timeout_ms,
        )
        self.context = ConnectionContext(
            Router(handlers or {}, prefix_handlers or {}),
            self.limits,
            self.metrics,
            tasks.create_task,
            lambda: network.now_ms,
            self.admissions,
            ConnectionLog(logging.getLogger(__name__), lambda: network.now_ms),
        )
        self._endpoint = BrokerEndpoint(1, lambda: [("192.0.2.9", 9092)])

    def connect(self) -> Peer:
        """Connects a client."""
        client = Peer()
        admission = self.admissions.admit(CLIENT_ADDRESS[0], lambda _: None)
        assert isinstance(admission, Admission)
        connection = ClientConnection(self.context, self._endpoint, self.registry, admission, CLIENT_ADDRESS)
        self.network.accept(connection, client)
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
