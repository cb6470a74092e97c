"""The composition root of one process: builds its parts from the settings in order, and closes them in reverse order.

metrics, admin HTTP -> ports -> broker client -> remote tier -> listeners -> ready -> signal -> drain -> end

Every process has one role. A `Proxy` serves clients, as one of the workers. A `RemoteLogProcess` and a
`RemoteReaderProcess` run beside the workers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from protocol.api_keys import ApiKey
from proxy.admin.facts import BROKERS, ProcessState
from proxy.admin.source import OwnFacts
from proxy.cluster.broker_listeners import Listen, ListenerAddresses
from proxy.cluster.topology import Topology
from proxy.config import TidegateConfig
from proxy.handlers.addresses import ADDRESS_APIS, AddressHandler
from proxy.handlers.api_versions import ApiVersionsHandler
from proxy.handlers.drain_answers import DRAIN_ANSWERS
from proxy.handlers.fetch.pass_through import PassThroughFetchHandler, ShareFetchHandler
from proxy.handlers.produce import ProduceHandler
from proxy.listener_config import ListenerConfig
from proxy.logging_setup import set_level
from proxy.metrics import ProxyMetrics, register_build_info
from proxy.process.admin.access import AdminAccess
from proxy.process.admin.http import Health, Reasons, admin_http
from proxy.process.admin.process_alarms import ProcessAlarm, Trouble, troubles_of
from proxy.process.admin.process_state import STATE_LINE, register_state
from proxy.process.checks.loop_latency import LoopLatency
from proxy.process.checks.open_files import fit_open_files
from proxy.process.live_settings import Reload, hold_reloads, take_reloads
from proxy.process.remote_tier import ProxyParts, RemoteTier, WorkerPlace, own_topics_of, remote_tier
from proxy.process.role import Role
from proxy.process.start.end_signals import set_by_end_signals
from proxy.process.start.port_claims import PortClaims
from proxy.wire.context import Router
from proxy.wire.error_log import Incident
from proxy.wire.exchange import Handler, PrefixHandler
from proxy.wire.limits import Limits
from proxy.wire.server import Entrance, ProxyServer, monotonic_ms
from proxy.wire.tls import listener_tls
from tiers.broker.client import wall_clock_ms
from tiers.event_loop import EventLoop

logger = logging.getLogger(__name__)


def pass_through_handlers() -> dict[int, Handler]:
    """Returns the handlers of a proxy without a remote tier, except the handler of Produce."""
    return {
        **dict.fromkeys(ADDRESS_APIS, AddressHandler()),
        ApiKey.API_VERSIONS: ApiVersionsHandler(),
        ApiKey.FETCH: PassThroughFetchHandler(),
        ApiKey.SHARE_FETCH: ShareFetchHandler(),
    }


def listener_addresses(listener: ListenerConfig) -> ListenerAddresses:
    return ListenerAddresses(
        listener.host,
        listener.advertised_host,
        listener.bootstrap_port,
        None if listener.names_brokers_by_sni else listener.base_port,
        listener.advertised_base_port,
        listener.advertised_port,
    )


def entrance_of(listener: ListenerConfig, ports: PortClaims) -> Entrance:
    """Returns how clients come in. The workers share the ports with no other program. Raises `TlsError`."""
    opens = partial(ports.open, listener.name)
    return Entrance(listener_tls(listener.tls), listener.proxy_protocol_trusted_networks, opens)


class Proxy(Role):
    """Serves clients as one of the workers. The remote tier installs its handlers before it accepts the first client.

    `worker` is the place of this process among the workers. `ports` opens the ports that they share."""

    def __init__(
        self,
        config: TidegateConfig,
        registry: CollectorRegistry,
        worker: WorkerPlace,
        ports: PortClaims,
    ) -> None:
        self.metrics = ProxyMetrics()
        registry.register(self.metrics)
        super().__init__(config, registry, self.metrics)
        entrances = [entrance_of(each, ports) for each in config.listener]
        self.topology = Topology(
            self.client,
            config.upstream.bootstrap_servers,
            [
                (listener_addresses(each), self._listen_through(entrance))
                for each, entrance in zip(config.listener, entrances, strict=True)
            ],
            clock_ms=monotonic_ms,
            own_topics=own_topics_of(config),
            refresh_interval_ms=config.upstream.metadata_max_age_ms,
        )
        self.handlers = pass_through_handlers()
        self.prefix_handlers: dict[int, PrefixHandler] = {ApiKey.PRODUCE: ProduceHandler()}
        self.server = ProxyServer(
            Router(self.handlers, self.prefix_handlers),
            Limits.of(fit_open_files(config.limits)),
            self.metrics,
            drain_answers=DRAIN_ANSWERS,
            upstream_tls=self.client.tls,
            brokers_ask_for_sasl=config.upstream.sasl is not None,
        )
        certificates = (self.client.tls, *(each.tls for each in entrances))
        self.view.alarms.watch(ProcessAlarm.CERTIFICATES_UNUSABLE, partial(troubles_of, *certificates))
        self.view.alarms.watch(ProcessAlarm.LISTENER_NOT_OPEN, lambda: self.topology.unserved)
        self.view.alarms.watch(ProcessAlarm.NO_BROKER_ANSWERS, self._silence)
        self.view.alarms.watch(ProcessAlarm.PROXY_REJECTED, lambda: _said(self.topology.refusal))
        self._worker = worker
        self._tier: RemoteTier | None = None

    def _listen_through(self, entrance: Entrance) -> Listen:
        return lambda host, port, endpoint: self.server.listen(host, port, endpoint, entrance)

    @property
    def state(self) -> ProcessState:
        is_rejected = self.topology.refusal is not None and not self._stops
        return ProcessState.FAILED if is_rejected else super().state

    def _has_begun(self) -> bool:
        return self.topology.is_ready and (self._tier is not None or not self._live.config.is_tiered)

    def not_serving(self) -> list[str]:
        if self._stops:
            return ["stopping"]
        if not self.topology.is_ready:
            return [f"the proxy has not read the cluster yet: {self.topology.trouble or 'no answer so far'}"]
        return self.topology.unreachable or ([] if self.topology.serves_a_broker else self.topology.unserved)

    def not_ready(self) -> list[str]:
        if reasons := self.not_serving():
            return reasons
        if self.topology.refusal is not None:
            return [f"the brokers reject the proxy: {self.topology.refusal}"]
        return [*self.topology.unserved, *([] if self._tier is None else self._tier.not_ready())]

    def _silence(self) -> list[Trouble]:
        if (silence := self.topology.silence) is None:
            return []
        reason, lasting_ms = silence
        return [Trouble(reason, BROKERS, wall_clock_ms() - lasting_ms)]

    def errors(self) -> Sequence[Incident]:
        return self.server.errors.incidents

    async def open(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.client.close)
        await stack.enter_async_context(self.server)
        if not self._live.config.is_tiered:
            # Without a remote tier, clients do not depend on the proxy's own login. But the brokers' rejection of that
            # login shows a mistake in the settings, so it ends the start.
            await self.topology.meet_cluster()

    async def open_tier(self, stack: AsyncExitStack) -> None:
        await self.topology.wait_for_cluster()
        parts = ProxyParts(self._live, self.client, self.topology, self.server.spawn, self._registry, self.view)
        tier = await stack.enter_async_context(remote_tier(parts, self._worker))
        self.handlers.update(tier.handlers)
        self.prefix_handlers.update(tier.prefix_handlers)
        self._tier = tier

    def listen(self, stack: AsyncExitStack) -> None:
        """Binds the bootstrap ports, and follows the cluster's metadata until the stack closes. Raises `OSError`."""
        self.topology.listen_for_bootstrap()
        following = self.server.spawn(self.topology.run())
        stack.callback(following.cancel)

    def serve(self, stack: AsyncExitStack) -> None:
        self.listen(stack)
        upstream = self._live.config.upstream
        if upstream.tls is not None and upstream.tls.certificate is not None and upstream.sasl is None:
            logger.warning(
                "[upstream.tls] has a certificate, but there is no [upstream.sasl]: if the brokers do not require "
                "SASL, every client has the rights of this certificate"
            )
        for listener in self._live.config.listener:
            logger.info("serving %s:%d", listener.host, listener.bootstrap_port)

    def change(self, config: TidegateConfig) -> None:
        self.server.change_limits(Limits.of(fit_open_files(config.limits)))
        super().change(config)

    async def drain(self) -> None:
        await super().drain()
        await self.server.drain(node_ids=self.topology.node_ids)


@dataclass(frozen=True, slots=True)
class ChildAdmin:
    """How the supervisor reads a child's admin pages: an open listener, and the token that it asks for."""

    listener: socket.socket
    token: str


MakeRole = Callable[[TidegateConfig, CollectorRegistry], Role]
LoadConfig = Callable[[], TidegateConfig]
"""Reads the settings. Raises `ConfigError`."""


async def run(
    config: TidegateConfig,
    make_role: MakeRole,
    stop: asyncio.Event | None = None,
    admin: ChildAdmin | None = None,
    load: LoadConfig | None = None,
) -> None:
    """Serves until SIGTERM or `stop`, then drains. Raises `OSError` if a port cannot be bound.

    `admin` is for the pages that the supervisor asks; None if there is no admin port. `load` reads the settings again
    on SIGHUP."""
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    # A second series per counter, which tells what the process's start time tells.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library gives this function alone no types
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    register_build_info(registry)
    async with AsyncExitStack() as stack:
        registry.register(stack.enter_context(LoopLatency(loop, time.monotonic)))
        # A terminal sends SIGINT to all processes. The supervisor ends its children one after the other.
        stack.enter_context(set_by_end_signals(stop, [signal.SIGTERM]))
        role = make_role(config, registry)
        stack.enter_context(role.view.events.attached())
        register_state(registry, lambda: role.state)

        def with_state(reasons: Reasons) -> list[str]:
            found = reasons()
            return [f"{STATE_LINE}{role.state}", *found] if found else []

        health = Health(partial(with_state, role.not_serving), partial(with_state, role.not_ready))

        if admin is not None:
            access = AdminAccess(lambda: admin.token)
            facts = OwnFacts(role.view.parts, role.errors, clock_ms=monotonic_ms, wall_clock_ms=wall_clock_ms)
            await stack.enter_async_context(admin_http(admin.listener, registry, health, facts, access))
        is_open = await _unless_stopped(role.open, stack, stop)
        if load is not None:
            reload = Reload(config, load, partial(apply_settings, role))
            role.view.alarms.watch(ProcessAlarm.SETTINGS_NOT_RELOADED, partial(troubles_of, reload))
            loop.add_signal_handler(signal.SIGHUP, reload)
            stack.callback(loop.remove_signal_handler, signal.SIGHUP)
            take_reloads()
            stack.callback(hold_reloads)
        if is_open and config.is_tiered:
            is_open = await _unless_stopped(role.open_tier, stack, stop)
        if is_open:
            role.serve(stack)
            await stop.wait()
            logger.info("stopping: draining")
            await role.drain()
    logger.info("stopped")


def _said(error: Exception | None) -> list[str]:
    return [] if error is None else [str(error)]


def apply_settings(role: Role, config: TidegateConfig) -> None:
    """Applies the settings of a reload."""
    set_level(config.log.level)
    role.change(config)


async def _unless_stopped(
    opens: Callable[[AsyncExitStack], Awaitable[None]], stack: AsyncExitStack, stop: asyncio.Event
) -> bool:
    """Opens parts of a role, and returns False if `stop` is set first.

    The current task opens them, and `stop` cancels that task: a task group must be entered and left by the same task,
    and the current task also closes the stack."""
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        await stop.wait()
        task.cancel()

    trouble: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            try:
                await opens(stack)
            except Exception as error:
                trouble = error
            finally:
                watching.cancel()
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        task.uncancel()
        return False
    if trouble is not None:
        raise trouble
    return True


def serve(
    config: TidegateConfig,
    make_role: MakeRole,
    admin: ChildAdmin | None = None,
    load: LoadConfig | None = None,
) -> None:
    """Calls `run` on a new event loop."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run(config, make_role, None, admin, load))
