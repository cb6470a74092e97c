"""The composition root: builds every part of a process from its settings, in order, and takes them down in reverse.

metrics, admin HTTP -> broker client -> topology and listeners -> remote tier -> ready -> signal -> drain -> end
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from protocol.addresses import AddressOf
from protocol.api_keys import CLUSTER_APIS, HIDDEN_APIS, ApiKey
from proxy.admin_http import admin_http
from proxy.config import TidegateConfig
from proxy.context import ConnectionLimits
from proxy.early_answers import EARLY_ANSWERS
from proxy.exchange import Handler
from proxy.handlers.addresses import ADDRESS_APIS, AddressHandler
from proxy.handlers.api_versions import ApiVersionsHandler
from proxy.handlers.pass_through_fetch import PassThroughFetchHandler
from proxy.handlers.produce import ProduceHandler
from proxy.metrics import ProxyMetrics
from proxy.remote_tier import RemoteTier, remote_tier
from proxy.router import Router
from proxy.server import ProxyServer, monotonic_ms
from proxy.topology import ListenerAddresses, Topology
from tiers.broker.client import BrokerClient

logger = logging.getLogger(__name__)

CLIENT_ID = "tidegate"


def pass_through_handlers(address_of: AddressOf, *, is_tiered: bool = False) -> dict[int, Handler]:
    """What a proxy without a remote tier decodes, but for Produce.

    Share groups read the broker's log alone: beside a remote tier they would skip what was trimmed, so they are hidden.
    """
    addresses = AddressHandler(address_of)
    return {
        **dict.fromkeys(ADDRESS_APIS, addresses),
        ApiKey.API_VERSIONS: ApiVersionsHandler(HIDDEN_APIS if is_tiered else CLUSTER_APIS),
        ApiKey.FETCH: PassThroughFetchHandler(address_of),
    }


def listener_addresses(config: TidegateConfig) -> ListenerAddresses:
    listener = config.listener
    return ListenerAddresses(listener.host, listener.advertised_host, listener.bootstrap_port, listener.base_port)


def broker_client(config: TidegateConfig) -> BrokerClient:
    return BrokerClient(
        config.upstream.bootstrap_servers,
        client_id=CLIENT_ID,
        request_timeout_ms=config.upstream.request_timeout_ms,
    )


class Proxy:
    """The proxy half of a process. The remote tier brings handlers of its own before the first client is let in."""

    def __init__(self, config: TidegateConfig, registry: CollectorRegistry) -> None:
        self.metrics = ProxyMetrics()
        registry.register(self.metrics)
        self.client = broker_client(config)
        self.topology = Topology(
            self.client,
            config.upstream.bootstrap_servers,
            listener_addresses(config),
            lambda host, port, endpoint: self.server.listen(host, port, endpoint),
            clock_ms=monotonic_ms,
            refresh_interval_ms=config.upstream.metadata_max_age_ms,
        )
        self.handlers = pass_through_handlers(self.topology.advertised_address, is_tiered=config.is_tiered)
        limits: ConnectionLimits = config.limits.of_connections()
        prefix_handlers: Mapping[int, ProduceHandler] = {
            ApiKey.PRODUCE: ProduceHandler(self.topology.advertised_address)
        }
        self.server = ProxyServer(
            Router(self.handlers, prefix_handlers),
            limits,
            self.metrics,
            early_answers=EARLY_ANSWERS,
            reuse_port=config.listener.reuse_port,
        )
        self._config = config
        self._registry = registry
        self._tier: RemoteTier | None = None
        self._stops = False

    def not_ready(self) -> list[str]:
        if self._stops:
            return ["stopping"]
        if not self.topology.is_ready:
            return [f"the cluster was not read yet: {self.topology.trouble or 'no answer so far'}"]
        return [] if self._tier is None else self._tier.not_ready()

    async def open(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.client.close)
        await stack.enter_async_context(self.server)

    async def open_tier(self, stack: AsyncExitStack) -> None:
        """Returns when the remote tier can be served. Raises `RemoteTierError`."""
        await self.topology.wait_for_cluster()
        tier = await stack.enter_async_context(
            remote_tier(self._config, self.client, self.topology, self.server.spawn, self._registry)
        )
        self.handlers.update(tier.handlers)
        self._tier = tier

    def listen(self, stack: AsyncExitStack) -> None:
        """Binds the bootstrap port and follows the cluster until the stack is left. Raises `OSError`."""
        self.topology.listen_for_bootstrap()
        following = self.server.spawn(self.topology.run())
        stack.callback(following.cancel)

    async def drain(self) -> None:
        self._stops = True
        await self.server.drain()


async def run(config: TidegateConfig, stop: asyncio.Event | None = None) -> None:
    """Serves until SIGTERM, SIGINT or `stop`, then drains. Raises `OSError` when a port cannot be bound."""
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    async with AsyncExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
            stack.callback(loop.remove_signal_handler, number)
        proxy = Proxy(config, registry)
        if config.admin.port:
            await stack.enter_async_context(admin_http(config.admin.host, config.admin.port, registry, proxy.not_ready))
        await proxy.open(stack)
        if config.is_tiered and not await _open_tier(proxy, stack, stop):
            return
        proxy.listen(stack)
        logger.info(
            "serving %s:%d", config.listener.advertised_host, config.listener.bootstrap_port,
            extra={"host": config.listener.host},
        )  # fmt: skip
        await stop.wait()
        logger.info("stopping: draining connections")
        await proxy.drain()
    logger.info("stopped")


async def _open_tier(proxy: Proxy, stack: AsyncExitStack, stop: asyncio.Event) -> bool:
    """False when `stop` came first. In this very task, which also closes what it opens."""
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        await stop.wait()
        task.cancel()

    watching = proxy.server.spawn(watch())
    try:
        await proxy.open_tier(stack)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        task.uncancel()
        return False
    finally:
        watching.cancel()
    return True


def serve(config: TidegateConfig) -> None:
    """`run` on an event loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(config))
