"""`[limits]`: the limits of clients."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from protocol.frame import MAX_INT32, MAX_REQUEST_BYTES
from tiers.config.settings import DurationMs, Section, SizeBytes

KIB = 1024
MIB = 1024 * KIB


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


class LimitsConfig(Section):
    """The limits of each client and of all clients together."""

    max_connections: int = Field(
        10_000, alias="max.connections", ge=0, description="The number of client connections. 0 means no limit."
    )
    max_connections_per_address: int = Field(
        0,
        alias="max.connections.per.address",
        ge=0,
        description="The number of client connections from one IP address. 0 means no limit.",
    )
    handshake_timeout_ms: DurationMs = Field(
        10_000, alias="handshake.timeout.ms", gt=0, description="How long a TLS handshake with a client may take."
    )
    max_request_bytes: SizeBytes = Field(
        100 * MIB, alias="socket.request.max.bytes", gt=0, description="The maximum size of a request, as on a broker."
    )
    max_unauthenticated_request_bytes: SizeBytes = Field(
        512 * KIB,
        alias="sasl.server.max.receive.size",
        gt=0,
        description=(
            "The maximum size of a request before the client has authenticated. It applies if there is an "
            "`[upstream.sasl]`."
        ),
    )
    max_held_request_bytes: SizeBytes = Field(
        16 * MIB,
        alias="held.request.max.bytes",
        gt=0,
        description="The maximum size of a request of an API that the proxy decodes.",
    )
    max_held_response_bytes: SizeBytes = Field(
        128 * MIB,
        alias="held.response.max.bytes",
        gt=0,
        description="The maximum size of a response that the proxy decodes as a whole.",
    )
    max_held_remote_bytes: SizeBytes = Field(
        64 * MIB,
        alias="held.remote.responses.max.bytes",
        gt=0,
        description=(
            "The memory for all responses with remote records together, until the clients have received them."
        ),
    )
    remote_fetch_max_bytes_per_second: SizeBytes | None = Field(
        None,
        alias="remote.fetch.max.bytes.per.second",
        gt=0,
        description=(
            "The quota for the reads from the remote tier by the clients with one client id. It is divided evenly "
            "among workers."
        ),
    )
    max_in_flight: int = Field(
        256, alias="max.in.flight.requests", gt=0, description="The number of unanswered requests per connection."
    )
    connect_timeout_ms: DurationMs = Field(
        5_000, alias="connect.timeout.ms", gt=0, description="The deadline of one attempt to connect to a broker."
    )
    connect_deadline_ms: DurationMs = Field(
        20_000,
        alias="connect.deadline.ms",
        gt=0,
        description="The deadline of all attempts to connect to a broker, while the client waits.",
    )
    idle_timeout_ms: DurationMs = Field(
        0,
        alias="connections.max.idle.ms",
        ge=0,
        description="The time after which the proxy closes an idle connection. With 0, only the brokers close them.",
    )
    half_close_timeout_ms: DurationMs = Field(
        5_000,
        alias="half.close.timeout.ms",
        gt=0,
        description="How long the proxy still answers a client that has stopped sending.",
    )
    drain_timeout_ms: DurationMs = Field(
        30_000,
        alias="drain.timeout.ms",
        gt=0,
        description="How long the proxy waits for requests in progress when it stops.",
    )

    def of_connections(self, *, brokers_ask_for_sasl: bool) -> ConnectionLimits:
        return ConnectionLimits(
            max_unauthenticated_request_bytes=self.max_unauthenticated_request_bytes if brokers_ask_for_sasl else None,
            max_connections=self.max_connections,
            max_connections_per_address=self.max_connections_per_address,
            handshake_timeout_ms=self.handshake_timeout_ms,
            max_request_bytes=self.max_request_bytes,
            max_held_request_bytes=self.max_held_request_bytes,
            max_held_response_bytes=self.max_held_response_bytes,
            max_in_flight=self.max_in_flight,
            connect_timeout_ms=self.connect_timeout_ms,
            connect_deadline_ms=self.connect_deadline_ms,
            idle_timeout_ms=self.idle_timeout_ms,
            half_close_timeout_ms=self.half_close_timeout_ms,
            drain_timeout_ms=self.drain_timeout_ms,
        )
