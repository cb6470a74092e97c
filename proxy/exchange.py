"""The seam between a connection and the handlers: one request, what goes upstream for it, what the client gets.

The connection keeps order and back-pressure; a handler keeps Kafka's semantics. A handler's two calls are synchronous,
so that frames leave in the order they came and the common case costs no task; only an answer that must wait is a
coroutine.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.primitives import Buffer

Buffers = Sequence[Buffer]


@dataclass(slots=True)
class Request:
    """A client's request frame. `frame` is the payload without the length prefix; the connection gives up ownership."""

    api_key: int
    api_version: int
    correlation_id: int
    frame: bytes
    received_at_ms: int
    """The injected clock's monotonic milliseconds."""


class ResponsePatcher(Protocol):
    """Patches a response while it streams, by equal length."""

    def feed(self, data: memoryview) -> Buffers:
        """Bytes of the payload as they arrive; returns what may leave now. Buffers may alias `data`."""


class Exchange(Protocol):
    """What a handler may ask of the connection while it works on one request."""

    request: Request
    tier: str
    """Which tier served it, for the latency histograms: "local", "remote" or "none" (no log was read)."""
    on_sent: Callable[[], None] | None
    """Called once when the last byte of the answer has left, or it is certain that none will."""

    @property
    def connection_id(self) -> int:
        """Another one after every authentication: what is remembered by it was learned with the same rights."""

    @property
    def node_id(self) -> int | None:
        """The broker at the other end; None on the bootstrap port."""

    def try_forward(self, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        """Sends one more request of ours on this connection; awaits its response payload (the correlation id is ours).

        None when later requests of the client were sent upstream already: their responses would have to be overtaken.
        """


@dataclass(frozen=True, slots=True)
class Answer:
    """The client is answered without the broker; `payload` starts with the response header."""

    payload: Buffers


@dataclass(frozen=True, slots=True)
class Forward:
    """`frame` (payload without length) goes upstream.

    `hold_bytes`: responses up to this size are collected and given to `on_response`; larger ones stream through
    `patcher`, or untouched when there is none. `None` holds whatever its size. `no_response`: Produce with acks=0.
    """

    frame: Buffer
    hold_bytes: int | None = 0
    patcher: ResponsePatcher | None = None
    no_response: bool = False


@dataclass(frozen=True, slots=True)
class Prepare:
    """What goes upstream must be found out first, and later requests wait until it has left. For rare requests.

    The response is held. The coroutine is cancelled when the client goes away."""

    forward: Callable[[], Coroutine[None, None, Forward]]


@dataclass(frozen=True, slots=True)
class CutThrough:
    """The request goes upstream as its bytes arrive. The fields mean what they mean in `Forward`."""

    hold_bytes: int | None = 0
    no_response: bool = False


class Handler(Protocol):
    """One decoded API. Stateless but for what its constructor was given; per-request state is in `HandlerState`."""

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, HandlerState | None]:
        """What to do with the request. Raises `ProtocolError` for bytes that cannot be read: the connection closes."""


class PrefixHandler(Protocol):
    """An API whose requests are too large to hold, and whose first bytes tell enough: Produce."""

    def on_prefix(self, exchange: Exchange, prefix: memoryview) -> tuple[CutThrough, HandlerState | None]:
        """`prefix` is the payload from its start, as far as it has arrived; `exchange.request.frame` is empty.

        Raises `TruncatedError` when it needs more, and other `ProtocolError`s for what cannot be read."""


class HandlerState(Protocol):
    """One request under way."""

    def on_response(self, response: memoryview) -> Buffers | Coroutine[None, None, Buffers]:
        """The broker's held response payload in, the client's out.

        A coroutine is run as a task, cancelled on disconnect; `response` stays valid until it ends."""

    def on_abandoned(self) -> None:
        """The client or the broker went away before the response: release what the request holds. Called at most once,
        and never after `on_response` returned buffers."""
