"""What every connection of a process shares: limits, routes, the read buffer, metrics and the task group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from protocol.frame import MAX_INT32, MAX_REQUEST_BYTES
from proxy.admission import Admissions
from proxy.exchange import Buffers
from proxy.flow_control import BufferPool
from proxy.metrics import ProxyMetrics
from proxy.router import Router
from tiers.broker.tls import TlsContext

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Durations in milliseconds; 0 means no limit for `idle_timeout_ms` and the `max_connections`."""

    max_connections: int = 10_000
    max_connections_per_address: int = 0
    handshake_timeout_ms: int = 10_000
    """Of TLS with a client."""
    max_request_bytes: int = MAX_REQUEST_BYTES
    max_unauthenticated_request_bytes: int | None = None
    """Where brokers ask for SASL: of a request before the first answer to an authentication."""
    max_held_request_bytes: int = 16 * 1024 * 1024
    """Of a request that is decoded; others are cut through and never held."""
    max_response_bytes: int = MAX_INT32
    max_held_response_bytes: int = 128 * 1024 * 1024
    max_in_flight: int = 256
    """Requests of one connection that are not answered yet; reading pauses at it."""
    connect_timeout_ms: int = 5_000
    """Of one attempt."""
    connect_deadline_ms: int = 20_000
    """Of all attempts, while the client's bytes wait in its socket."""
    idle_timeout_ms: int = 0
    half_close_timeout_ms: int = 5_000
    """How long a client that has closed its writing side is still answered."""
    close_timeout_ms: int = 10_000
    """How long the last bytes may take to leave a connection that closes."""
    drain_timeout_ms: int = 30_000


class Endpoint(Protocol):
    """Where a listener's connections go."""

    @property
    def node_id(self) -> int | None:
        """None on the bootstrap port."""

    def addresses(self) -> Sequence[Address]:
        """The broker's addresses now, to be tried in order; asked again before every attempt."""


C = TypeVar("C")


class Abortable(Protocol):
    def abort(self) -> None: ...


class ConnectionRegistry(Generic[C]):
    """The open connections; `empty` is set while there are none."""

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


EarlyAnswer = Callable[[int, int], Buffers]
"""Builds a response payload from (api version, correlation id)."""


@dataclass(slots=True)
class ConnectionContext:
    router: Router
    limits: ConnectionLimits
    metrics: ProxyMetrics
    spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
    """Starts a task in the server's group."""
    clock_ms: Callable[[], int]
    admissions: Admissions
    early_answers: Mapping[int, EarlyAnswer] = field(default_factory=dict)
    """By API key: what a waiting request is answered when the proxy drains."""
    upstream_tls: TlsContext | None = None
    """None: brokers are spoken to in plain text."""
    buffers: BufferPool = field(default_factory=BufferPool)
    upstreams: ConnectionRegistry[Abortable] = field(default_factory=ConnectionRegistry)
    """Connections to brokers: they may outlive their clients by what is still to be sent."""
