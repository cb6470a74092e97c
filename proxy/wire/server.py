"""The listeners and their connections.

The server binds a listener synchronously, so that the proxy may advertise a broker's address as soon as it knows the
broker. The kernel queues connections until the server accepts them. All tasks of all connections live in the server's
task group.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network, IPv6Network

from protocol.addresses import AddressOf
from proxy.metrics import ProxyMetrics
from proxy.wire.admission import Admission, Admissions
from proxy.wire.client_listener import ClientListener
from proxy.wire.connection import ClientConnection
from proxy.wire.connection_log import ConnectionLog
from proxy.wire.context import (
    CLOSE_TIMEOUT_MS,
    Address,
    ConnectionContext,
    ConnectionRegistry,
    DrainAnswer,
    Endpoint,
    Router,
)
from proxy.wire.error_log import ErrorLog
from proxy.wire.limits import Limits
from proxy.wire.socket_transport import PipePool
from tiers.broker.tls import TlsContext

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 1024
_IDLE_SWEEPS = 4
DRAIN_PAUSE_MS = 500
"""How long a drain keeps the connections to half of the brokers. Meanwhile a client reconnects to the other half.

Kafka's clients wait for 50 ms before that (`reconnect.backoff.ms`)."""
LOOKS_S = 1.0
"""How often to look for clients that have left while the proxy does not read from them, and for slow ones."""
GIVE_WAY_S = 5.0
"""While a message waits for memory: how long a client may take to send a large request, or to receive 256 KiB."""
ANSWERED_S = 30.0
"""While a request waits for memory: how long another one may be in progress. Kafka's clients wait as long."""
_OTHERS_WAIT = "others wait for the memory of its {} (limits.held.messages.max.bytes)"
_POLLRDHUP = 0x2000
"""The client has sent its last byte. Python's `select` has no name for it."""


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _as_sent(node_id: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class BrokerEndpoint:
    """Where a listener leads to. `node_id` is None for the bootstrap port. `resolve` returns the current addresses.

    `address_of` returns the addresses that its clients get. By default they are those that the broker sent."""

    node_id: int | None
    resolve: Callable[[], Sequence[Address]]
    address_of: AddressOf = _as_sent

    def addresses(self) -> Sequence[Address]:
        return self.resolve()

    def named(self, server_name: str | None) -> Endpoint:
        return self


def bind(host: str, port: int, *, reuse_port: bool, listens: bool = True) -> socket.socket:
    """Returns a listener. Its connections wait in the kernel until they are accepted. Raises `OSError`.

    Without `listens` it accepts no connections. The call then only finds out whether the port is free."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if listens:
            listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    return listener


@contextlib.contextmanager
def named_in_errors(setting: str) -> Iterator[None]:
    """Adds the name of the setting that has the port to an `OSError`."""
    try:
        yield
    except OSError as error:
        hint = ": end the process that has the port, or set another" if error.errno == errno.EADDRINUSE else ""
        raise OSError(error.errno, f"{setting}: {error.strerror or error}{hint}") from error


OpenPort = Callable[[str, int], socket.socket]
"""Returns a listener at a host and a port. Raises `OSError`."""
_bind_alone: OpenPort = partial(bind, reuse_port=False)


@dataclass(frozen=True, slots=True)
class Entrance:
    """How clients come in through a listener. `tls` None means plain text."""

    tls: TlsContext | None = None
    proxy_networks: Sequence[IPv4Network | IPv6Network] = ()
    open_port: OpenPort = _bind_alone


OPEN = Entrance()
"""Plain text, without load balancers."""


def _admission_limits(limits: Limits, brokers_ask_for_sasl: bool) -> tuple[int, int, int, int]:
    per_address = limits.max_connections_per_address
    if per_address is None:
        # Without SASL, a stranger needs only one request to keep a place.
        per_address = 0 if brokers_ask_for_sasl else -(-limits.max_connections // 4)
    return (
        limits.max_connections,
        per_address,
        limits.max_unauthenticated_connections_per_address,
        limits.connection_setup_timeout_ms,
    )


class ProxyServer:
    """An async context manager. Its exit aborts every connection."""

    def __init__(
        self,
        router: Router,
        limits: Limits,
        metrics: ProxyMetrics,
        *,
        drain_answers: Mapping[int, DrainAnswer] | None = None,
        clock_ms: Callable[[], int] = monotonic_ms,
        upstream_tls: TlsContext | None = None,
        brokers_ask_for_sasl: bool = False,
        close_timeout_ms: int = CLOSE_TIMEOUT_MS,
        drain_pause_ms: int = DRAIN_PAUSE_MS,
        make_pipes: Callable[[], PipePool] | None = PipePool,
    ) -> None:
        """`upstream_tls` None means plain text with the brokers. `make_pipes` is for the context."""
        self.errors = ErrorLog()
        self._limits = limits
        self._metrics = metrics
        self._router = router
        self._early_answers = drain_answers or {}
        self._clock_ms = clock_ms
        self._upstream_tls = upstream_tls
        self._brokers_ask_for_sasl = brokers_ask_for_sasl
        self._close_timeout_ms = close_timeout_ms
        self._drain_pause_ms = drain_pause_ms
        self._make_pipes = make_pipes
        self._connections = ConnectionRegistry[ClientConnection]()
        self._servers: dict[Address, ClientListener] = {}
        self._tasks = asyncio.TaskGroup()
        self._is_draining = False
        self._sweeps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ProxyServer:
        await self._tasks.__aenter__()
        self._context = ConnectionContext(
            self._router,
            self._limits,
            self._metrics,
            self.spawn,
            self._clock_ms,
            Admissions(*_admission_limits(self._limits, self._brokers_ask_for_sasl)),
            ConnectionLog(logger, self._clock_ms),
            self._early_answers,
            upstream_tls=self._upstream_tls,
            brokers_ask_for_sasl=self._brokers_ask_for_sasl,
            close_timeout_ms=self._close_timeout_ms,
            errors=self.errors,
            pipes=None if self._make_pipes is None else self._make_pipes(),
        )
        self._sweeps = [self.spawn(self._close_idle()), self.spawn(self._look_at_clients())]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.stop_listening()
        for sweep in self._sweeps:
            sweep.cancel()
        await self._abort_all()
        await self._tasks.__aexit__(None, None, None)
        if self._context.pipes is not None:
            self._context.pipes.close()

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    @property
    def connections(self) -> Sequence[ClientConnection]:
        return list(self._connections)

    def listen(self, host: str, port: int, endpoint: Endpoint, entrance: Entrance = OPEN) -> Address:
        """Binds a listener now and returns its address. Accepting starts with the event loop's next turn.

        Port 0 picks a free port. Raises `OSError`."""
        listener = entrance.open_port(host, port)
        bound: Address = listener.getsockname()[:2]
        if bound in self._servers:  # with SO_REUSEPORT, both would get some of the connections
            listener.close()
            raise OSError(errno.EADDRINUSE, f"{host}:{port}: another listener of this proxy has this port")
        if self._is_draining:
            listener.close()
            return bound

        def make(admission: Admission, client: Address | None) -> ClientConnection:
            return ClientConnection(self._context, endpoint, self._connections, admission, client)

        self._servers[bound] = ClientListener(listener, entrance.tls, entrance.proxy_networks, make, self._context)
        return bound

    def change_limits(self, limits: Limits) -> None:
        """Replaces the limits. Open connections keep those that they took over when they opened."""
        self._limits = self._context.limits = limits
        self._context.admissions.change_limits(*_admission_limits(limits, self._brokers_ask_for_sasl))

    def stop_listening(self) -> None:
        self._is_draining = True
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    async def drain(self, timeout_ms: int | None = None, node_ids: Collection[int] = ()) -> bool:
        """Stops accepting, answers the requests in progress, and closes the connections.

        The connections to every other broker of `node_ids` close after a pause. A Java client that loses all its
        brokers at once forgets the cluster's metadata (KIP-899), and its consumer group then rebalances.
        Aborts the connections that are still open at the timeout, and then returns False."""
        self.stop_listening()
        last = set(sorted(node_ids)[1::2])
        timeout_ms = self._limits.drain_timeout_ms if timeout_ms is None else timeout_ms
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                for connection in list(self._connections):
                    if connection.node_id not in last:
                        connection.drain()
                if any(connection.node_id in last for connection in self._connections):
                    await asyncio.sleep(min(self._drain_pause_ms, timeout_ms / 2) / 1000)
                for connection in list(self._connections):
                    connection.drain()
                await self._connections.empty.wait()
                await self._context.upstreams.empty.wait()
        survivors = len(self._connections)
        if survivors:
            logger.warning("%d connections outlived the drain and are aborted", survivors)
        await self._abort_all()
        return not survivors

    async def _abort_all(self) -> None:
        """Aborts all transports, and waits until their connections have ended."""
        for connection in list(self._connections):
            connection.abort("stopped")
        await self._connections.empty.wait()
        for upstream in list(self._context.upstreams):
            upstream.abort()
        await self._context.upstreams.empty.wait()

    def spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(coroutine)

    async def _look_at_clients(self) -> None:
        while True:
            await asyncio.sleep(LOOKS_S)
            self._notice_ends()
            self._close_slow()

    def _notice_ends(self) -> None:
        """Ends the connections of clients that have left while the proxy does not read from them."""
        paused = {fd: each for each in self._connections if (fd := each.paused_fd) is not None}
        poll = select.poll()
        for fd in paused:
            poll.register(fd, _POLLRDHUP)
        for fd, events in poll.poll(0):
            if events & (select.POLLHUP | select.POLLERR):
                paused[fd].abort("client")
            else:
                paused[fd].half_close()

    def _close_slow(self) -> None:
        """Closes the connections that keep memory for too long while others wait for it."""
        context, now_s = self._context, asyncio.get_running_loop().time()
        for each in self.connections if context.responses.has_waiting else ():
            is_holding = each.is_full and context.responses.held(id(each)) is not None
            if is_holding and each.outlet.stalled_s(now_s) >= GIVE_WAY_S:
                each.end("stalled", _OTHERS_WAIT.format("response"))
        for budget, within_s in ((context.arriving, GIVE_WAY_S), (context.requests, ANSWERED_S)):
            for each in self.connections if budget.has_waiting else ():
                grant = budget.held(id(each))
                if grant is not None and grant.since_s <= now_s - within_s:
                    each.end("stalled", _OTHERS_WAIT.format("request"))

    async def _close_idle(self) -> None:
        while True:
            timeout_s = self._limits.idle_timeout_ms / 1000
            await asyncio.sleep(timeout_s / _IDLE_SWEEPS)
            for connection in self.connections:
                connection.close_idle(timeout_s)
