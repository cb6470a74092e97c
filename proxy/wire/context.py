"""The objects that all connections of a process share: limits, routes, read buffers, metrics and the task group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from protocol.frame import MAX_INT32, MAX_REQUEST_BYTES
from proxy.metrics import ProxyMetrics
from proxy.wire.admission import Admissions
from proxy.wire.exchange import Buffers
from proxy.wire.flow_control import BufferPool
from proxy.wire.router import Router
from tiers.broker.tls import TlsContext

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of connections.

    0 means no limit for `max_connections`, `max_connections_per_address` and `idle_timeout_ms`."""

    max_connections: int = 10_000
    max_connections_per_address: int = 0
    handshake_timeout_ms: int = 10_000
    """The deadline of a TLS handshake with a client."""
    max_request_bytes: int = MAX_REQUEST_BYTES
    max_unauthenticated_request_bytes: int | None = None
    """The limit for a request before the first answer to an authentication. None: the brokers do not require SASL."""
    max_held_request_bytes: int = 16 * 1024 * 1024
    """The limit for a request that a handler decodes. Other requests stream through and are never held."""
    max_response_bytes: int = MAX_INT32
    max_held_response_bytes: int = 128 * 1024 * 1024
    max_in_flight: int = 256
    """How many requests of one connection may be unanswered. Reading pauses at this number."""
    connect_timeout_ms: int = 5_000
    """The deadline of one attempt to connect to a broker."""
    connect_deadline_ms: int = 20_000
    """The deadline of all attempts together. The client's bytes wait in its socket meanwhile."""
    idle_timeout_ms: int = 0
    half_close_timeout_ms: int = 5_000
    """How long the proxy still answers a client that has closed its writing side."""
    close_timeout_ms: int = 10_000
    """How long a closing connection may take to send its last bytes."""
    drain_timeout_ms: int = 30_000


class Endpoint(Protocol):
    """The broker that a listener's connections lead to."""

    @property
    def node_id(self) -> int | None:
        """The broker's node id, or None on the bootstrap port."""

    def addresses(self) -> Sequence[Address]:
        """Returns the broker's current addresses in the order to try. Called again before every round of attempts."""


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
    limits: ConnectionLimits
    metrics: ProxyMetrics
    spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
    """Starts a task in the server's task group."""
    clock_ms: Callable[[], int]
    admissions: Admissions
    drain_answers: Mapping[int, DrainAnswer] = field(default_factory=dict)
    """By API key: builds the answer to a request that still waits when the proxy drains."""
    upstream_tls: TlsContext | None = None
    """None: the proxy speaks plain text with the brokers."""
    buffers: BufferPool = field(default_factory=BufferPool)
    upstreams: ConnectionRegistry[Abortable] = field(default_factory=ConnectionRegistry)
    """The connections to brokers. One outlives its client while it has requests left to send."""
