"""The objects that all connections of a process share: limits, routes, read buffers, metrics and the task group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from protocol.addresses import AddressOf
from proxy.metrics import ProxyMetrics
from proxy.wire.admission import Admissions
from proxy.wire.connection_log import ConnectionLog
from proxy.wire.error_log import ErrorLog
from proxy.wire.exchange import Buffers, Handler, PrefixHandler, Spawn
from proxy.wire.flow_control import BufferPool
from proxy.wire.limits import Limits
from proxy.wire.memory import MessageBudget
from proxy.wire.socket_transport import PipePool
from tiers.broker.tls import TlsContext

Address = tuple[str, int]

CLOSE_TIMEOUT_MS = 10_000


class Endpoint(Protocol):
    """The broker that a listener's connections lead to."""

    @property
    def node_id(self) -> int | None:
        """The broker's node id, or None on the bootstrap port."""

    @property
    def address_of(self) -> AddressOf:
        """Returns the address of a broker for the clients of this listener."""

    def addresses(self) -> Sequence[Address]:
        """Returns the broker's current addresses in the order to try. Called again before every round of attempts."""

    def named(self, server_name: str | None) -> Endpoint:
        """Returns where a client leads that named this host in its TLS handshake. None: it named none."""


C = TypeVar("C")


class Abortable(Protocol):
    def abort(self) -> None: ...


class ConnectionRegistry(Generic[C]):
    """The open connections. `empty` is set while there are none."""

    def __init__(self) -> None:
        self._members: set[C] = set()
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[C]:
        return iter(self._members)

    def __contains__(self, connection: C) -> bool:
        return connection in self._members

    def add(self, connection: C) -> None:
        self._members.add(connection)
        self.empty.clear()

    def discard(self, connection: C) -> None:
        self._members.discard(connection)
        if not self._members:
            self.empty.set()


DrainAnswer = Callable[[int, int], Buffers]
"""Builds a response payload from an API version and a correlation id."""


@dataclass(slots=True)
class ConnectionContext:
    router: Router
    limits: Limits
    metrics: ProxyMetrics
    spawn: Spawn
    clock_ms: Callable[[], int]
    admissions: Admissions
    log: ConnectionLog
    drain_answers: Mapping[int, DrainAnswer] = field(default_factory=dict)
    """By API key: builds the answer to a request that still waits when the proxy drains."""
    upstream_tls: TlsContext | None = None
    """None: the proxy speaks plain text with the brokers."""
    brokers_ask_for_sasl: bool = False
    """Whether a client must authenticate before it may send a large request."""
    close_timeout_ms: int = CLOSE_TIMEOUT_MS
    """How long a closing connection may take to send its last bytes."""
    errors: ErrorLog = field(default_factory=ErrorLog)
    buffers: BufferPool = field(default_factory=BufferPool)
    pipes: PipePool | None = None
    """None: the transports of plain-text connections are the event loop's own, which read every byte."""
    unreachable: set[Address] = field(default_factory=set)
    """The addresses of brokers whose last attempt to connect failed."""
    upstreams: ConnectionRegistry[Abortable] = field(default_factory=ConnectionRegistry)
    """The connections to brokers. One outlives its client while it has requests left to send."""
    arriving: MessageBudget = field(init=False)
    """The memory for requests that are held until they are whole."""
    requests: MessageBudget = field(init=False)
    """The memory for requests in decoded form, until their answers are complete."""
    responses: MessageBudget = field(init=False)
    """The memory for responses that are held, and for the answers made of them until they have been sent."""

    def __post_init__(self) -> None:
        quarter_bytes = -(-self.limits.max_decoded_bytes // 4)
        self.arriving, self.requests = MessageBudget(quarter_bytes), MessageBudget(quarter_bytes)
        self.responses = MessageBudget(2 * quarter_bytes)


@dataclass(frozen=True, slots=True)
class Router:
    """The handlers by API key. An API key is in at most one of the two maps."""

    handlers: Mapping[int, Handler] = field(default_factory=dict)
    prefix_handlers: Mapping[int, PrefixHandler] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if both := self.handlers.keys() & self.prefix_handlers.keys():
            raise ValueError(f"API keys {sorted(both)} have two handlers")
