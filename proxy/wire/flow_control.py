"""Backpressure, and reading without copies: all connections of an event loop share one read buffer.

Every connection reads into the same buffer, and writes slices of it to its peer. If the socket takes the write at once,
the buffer is free again. If the socket does not (the peer stalls), the transport keeps the slices. The buffer then
belongs to that connection until all bytes are sent, and another buffer takes its place. With a high-water mark of 0,
this is exactly when the transport calls `pause_writing`. So a stalled peer costs one buffer, whatever the frame's size.

A TLS transport passes its bytes to the socket's transport at once, and does not count the bytes that wait there. So an
outlet gives it one piece at a time, and the next piece only when the previous one has left. The uncounted bytes are
then at most one piece, not an answer of any size.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from socket import socket
from typing import Final, cast

from protocol.frame import FramePart
from protocol.primitives import Buffer
from proxy.wire.socket_transport import SocketTransport

READ_BUFFER_BYTES: Final = 256 * 1024
_SPARE_BUFFERS: Final = 16
TLS_PIECE_BYTES: Final = 256 * 1024

_NONE_UNSENT: Final[deque[memoryview]] = deque()
"""Of all outlets without TLS, which add nothing. An empty deque of their own would take 600 bytes."""

NOT_CONNECTED: Final = 1
PEER_IS_FULL: Final = 2
OUT_OF_TURN: Final = 4
DRAINING: Final = 8


class ReadGate:
    """Pauses and resumes reading. Each pause has a reason, and reading resumes when no reason is left."""

    __slots__ = ("_reasons", "_transport")

    def __init__(self) -> None:
        self._reasons = 0
        self._transport: asyncio.Transport | None = None

    @property
    def is_paused(self) -> bool:
        return self._reasons != 0

    @property
    def paused_fd(self) -> int | None:
        """The socket while reading is paused. None: it is not, and a read notices the end of the peer."""
        if not self._reasons or self._transport is None or self._transport.is_closing():
            return None
        return cast(socket, self._transport.get_extra_info("socket")).fileno()

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def pause(self, reason: int) -> None:
        if not self._reasons and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._reasons |= reason

    def resume(self, reason: int) -> None:
        if not self._reasons:
            return
        self._reasons &= ~reason
        if not self._reasons and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


def owned_parts(parts: Sequence[FramePart], *, copy: bool) -> list[FramePart]:
    """Returns parts that stay valid after the next read. `copy`: copies parts that are slices of the read buffer."""
    return [part._replace(data=memoryview(bytes(part.data))) for part in parts] if copy else list(parts)


class BufferPool:
    """The read buffers of an event loop. Every connection reads into `current`."""

    __slots__ = ("_spare", "current")

    def __init__(self) -> None:
        self.current = memoryview(bytearray(READ_BUFFER_BYTES))
        self._spare: list[memoryview] = []

    def retire(self) -> memoryview:
        """Takes `current` out of use and returns it, because a pending write still refers to it."""
        retired = self.current
        self.current = self._spare.pop() if self._spare else memoryview(bytearray(READ_BUFFER_BYTES))
        return retired

    def give_back(self, buffers: list[memoryview]) -> None:
        self._spare.extend(buffers[: _SPARE_BUFFERS - len(self._spare)])
        buffers.clear()


class Outlet:
    """The writing side of a connection. The transport owns the buffers of a `write` until it has sent them."""

    __slots__ = (
        "_is_tls",
        "_is_writing",
        "_looked",
        "_on_sent",
        "_pool",
        "_retained",
        "_transport",
        "_unsent",
        "_written_bytes",
    )

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._retained: list[memoryview] = []
        self._on_sent: list[Callable[[], None]] = []
        self._transport: asyncio.Transport | None = None
        self._is_tls = False
        self._is_writing = False
        self._looked: tuple[float, int] | None = None
        """When `stalled_s` saw progress, and what had left then. None: it has not looked since all bytes had left."""
        self._written_bytes = 0
        self._unsent = _NONE_UNSENT
        """TLS only: the bytes that the transport has not been given yet."""

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        # A plain transport pauses above its high-water mark. A TLS transport pauses at the mark, so with 0 it would
        # never resume.
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        if self._is_tls:
            self._unsent = deque()
        transport.set_write_buffer_limits(high=1 if self._is_tls else 0, low=0)

    def write(
        self, buffers: Sequence[Buffer], *, aliases_pool: bool, on_sent: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Writes `buffers`. `aliases_pool`: some of them are slices of the current read buffer.

        `on_sent` are called once, when all bytes written so far are sent or when they never will be."""
        transport = self._transport
        if on_sent:
            self._on_sent += on_sent
        if transport is None:
            self._end()
            return
        if transport.is_closing():
            return
        for buffer in buffers:
            self._written_bytes += len(buffer)
        if self._is_tls:
            self._unsent.extend(memoryview(buffer) for buffer in buffers if len(buffer))
            self._write_pieces(transport)
        elif len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)
        if not self._is_full(transport):
            if self._on_sent:
                self._end()
        elif aliases_pool:
            self._retained.append(self._pool.retire())

    @property
    def can_splice(self) -> bool:
        return isinstance(self._transport, SocketTransport)

    def splice(self, fd: int, max_bytes: int) -> int | None:
        """Moves bytes from the socket `fd` to the peer, as `RelayingProtocol.relay` describes it."""
        transport = self._transport
        return transport.splice(fd, max_bytes) if isinstance(transport, SocketTransport) else None

    def _write_pieces(self, transport: asyncio.Transport) -> None:
        """Writes pieces while the transport's buffer is empty. A TLS write may call `resume_writing`, and re-enter."""
        if self._is_writing:
            return
        self._is_writing = True
        try:
            while self._unsent and not transport.get_write_buffer_size():
                piece: list[memoryview] = []
                room = TLS_PIECE_BYTES
                while self._unsent and room:
                    buffer = self._unsent.popleft()
                    if len(buffer) > room:
                        self._unsent.appendleft(buffer[room:])
                        buffer = buffer[:room]
                    piece.append(buffer)
                    room -= len(buffer)
                transport.writelines(piece)
        finally:
            self._is_writing = False

    @property
    def sent_bytes(self) -> int:
        """The bytes that have left so far. With TLS, a piece counts when the next one is given to the transport."""
        if isinstance(self._transport, SocketTransport):
            return self._transport.sent_bytes
        waiting_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._written_bytes - waiting_bytes - sum(map(len, self._unsent))

    def stalled_s(self, now_s: float) -> float:
        """How long the peer has not received a buffer's worth, as far as the calls of this method show it."""
        if self._looked is None or self.sent_bytes >= self._looked[1] + READ_BUFFER_BYTES:
            self._looked = now_s, self.sent_bytes
        return now_s - self._looked[0]

    def _is_full(self, transport: asyncio.Transport) -> bool:
        return self._is_writing or bool(self._unsent) or transport.get_write_buffer_size() > 0

    def on_drained(self) -> bool:
        """Handles `resume_writing` at a low-water mark of 0.

        Returns False if the transport was given more bytes, or is being given them. Another call follows when those are
        sent."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            if self._is_writing:
                asyncio.get_running_loop().call_soon(self._resume_again, transport)
                return False
            self._write_pieces(transport)
            if self._is_full(transport):
                return False
        self._end()
        return True

    def _resume_again(self, transport: asyncio.Transport) -> None:
        if transport is self._transport and not self._is_full(transport):
            transport.get_protocol().resume_writing()

    def close(self) -> None:
        """Closes the transport when all written bytes have left."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        unsent = [*self._unsent]
        self._unsent.clear()
        if unsent:
            transport.writelines(unsent)
        transport.close()

    def on_lost(self) -> None:
        """Drops the unsent bytes, because the connection is lost."""
        self._transport = None
        self._unsent.clear()
        self._end()

    def _end(self) -> None:
        self._looked = None
        if self._retained:
            self._pool.give_back(self._retained)
        called, self._on_sent = self._on_sent, []
        for on_sent in called:
            on_sent()
