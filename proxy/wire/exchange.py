"""The interface between a connection and the request handlers.

The connection guarantees order and backpressure. A handler implements Kafka's semantics. A handler's two calls are
synchronous, so that frames leave in the order of their arrival and the common case needs no task. Only an answer that
must wait is a coroutine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.addresses import AddressOf
from protocol.primitives import Buffer

Buffers = Sequence[Buffer]

Respond = Callable[[memoryview], Buffers | Coroutine[None, None, Buffers]]
"""Takes the payload of the broker's held response to one request, and returns the payload for the client.

The connection runs a coroutine as a task, and cancels it on disconnect. The broker's payload is valid until it ends."""

Spawn = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
"""Starts a task in the server's task group. The coroutine must not raise anything but `CancelledError`."""


@dataclass(slots=True)
class Request:
    """A client's request. `frame` is the payload without the length prefix; the handler owns it."""

    api_key: int
    api_version: int
    correlation_id: int
    frame: bytes
    received_at_ms: int
    """In milliseconds of the injected monotonic clock."""


class BrokerGoneError(Exception):
    """The connection to the broker has ended, and the response to a request of the proxy itself can no longer come."""


class ResponsePatcher(Protocol):
    """Patches a response while it streams. A patch does not change the length."""

    @property
    def passing_bytes(self) -> int:
        """The number of bytes that come next and pass as they are, for example records."""

    def skip(self, count: int) -> None:
        """Goes on behind `count` bytes that were not fed. They are at most `passing_bytes`."""

    @property
    def untaken_bytes(self) -> int:
        """How many of the last bytes of a `feed` were not taken. They are fed again."""

    def feed(self, data: memoryview, max_groups: int) -> Buffers:
        """Takes the next bytes of the payload, and returns the bytes that may leave now. They may alias `data`.

        Takes at most `max_groups` groups of fields, for example partitions."""


class Exchange(Protocol):
    """One request, and the operations of the connection that its handler may use."""

    request: Request
    tier: str
    """The tier that served the request, for latency metrics: "local", "remote" or "none" (no log was read)."""
    on_sent: Callable[[], None] | None
    """Called once, when the last byte of the answer has left or when it is certain that the answer never will."""
    on_abandoned: Callable[[], None] | None
    """Ends the work for the request, because the client or the broker disconnected, or the proxy drains.

    Called at most once, and never after the request's `Respond` returned buffers."""

    @property
    def connection_id(self) -> int:
        """Changes with every authentication, so facts stored under one id were learned with the same rights."""

    @property
    def node_id(self) -> int | None:
        """The node id of the connected broker, or None on the bootstrap port."""

    @property
    def address_of(self) -> AddressOf:
        """Returns the address of a broker for the clients of the listener through which the client came."""

    def count_decoded(self) -> None:
        """Counts the request's decoded form as memory of the connection until the answer is complete.

        Only a Fetch may be decoded late. All other requests count so from the start."""

    def try_forward(self, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        """Sends a request of the proxy itself on this connection. The coroutine returns the response's payload.

        It has no deadline of its own. The client waits for the broker as if for its own request. The end of the
        client's connection cancels the coroutine. After the end of the broker's connection, it raises
        `BrokerGoneError`. A handler may let that error through: the client's connection then closes.

        The handler chooses the correlation id in `frame`. Returns None if a later request of the client is already on
        its way to the broker, because that request's response would come first. Also returns None if the connection to
        the broker is gone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The proxy answers the client without the broker. `payload` starts with the response header."""

    payload: Buffers


@dataclass(frozen=True, slots=True)
class Forward:
    """The connection sends `frame`, the payload without the length prefix, to the broker.

    `hold_bytes`: the connection collects a response up to this size and gives it to `Respond`. A larger response
    streams through the patcher that `patcher` makes, or unchanged if there is none. None: a response of any size is
    collected. `no_response`: the broker does not answer (Produce with acks=0). `passes` says of a collected response
    that it leaves as it is; then there is no call of `Respond`.
    """

    frame: Buffer
    hold_bytes: int | None = 0
    patcher: Callable[[], ResponsePatcher] | None = None
    passes: Callable[[memoryview], bool] | None = None
    no_response: bool = False


@dataclass(frozen=True, slots=True)
class Prepare:
    """The handler must first find out what to do with the request. For rare requests: later requests wait meanwhile.

    The connection cancels the coroutine if the client disconnects."""

    decide: Callable[[], Coroutine[None, None, Answer | Forward]]


@dataclass(frozen=True, slots=True)
class CutThrough:
    """The connection sends the request to the broker while its bytes arrive. The fields are those of `Forward`."""

    hold_bytes: int | None = 0
    passes: Callable[[memoryview], bool] | None = None
    no_response: bool = False


class Handler(Protocol):
    """Handles one API whose requests are decoded. `Respond` has the state of a request."""

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        """Decides how the request is answered. Without a `Respond`, the broker's response goes on as it is.

        Raises `ProtocolError` if the bytes cannot be read; the connection then closes."""


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """The first bytes of a request are not enough after all. The connection collects it, and gives it to `handler`."""

    handler: Handler


class BegunRequest(Protocol):
    """A request of which the first bytes have arrived."""

    @property
    def api_key(self) -> int: ...

    @property
    def api_version(self) -> int: ...

    @property
    def address_of(self) -> AddressOf:
        """As in `Exchange`."""


class PrefixHandler(Protocol):
    """Handles an API whose requests need not be held, because their first bytes are enough for a decision."""

    def on_prefix(self, begun: BegunRequest, prefix: memoryview) -> tuple[CutThrough, Respond | None] | HeldRequest:
        """`prefix` is the part of the payload that has arrived, from its start.

        Raises `TruncatedError` if it needs more bytes, and other `ProtocolError`s if the bytes cannot be read."""
