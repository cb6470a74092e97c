"""Back-pressure, and reading without copying: one buffer for every connection of a loop, given away when a peer stalls.

Every connection reads into the same buffer and writes slices of it on. A write that the socket takes at once leaves the
buffer free. One that it does not take (a peer that stalls) keeps its slices, so the buffer is retired to that peer
until all is sent, and another takes its place. With a high-water mark of 0 that is exactly when the transport calls
`pause_writing`, so a stalled peer costs one buffer, whatever the size of the frame that is under way.

A transport of TLS hands what it is given at once to the socket's own transport, and does not count what waits there. So
it is given pieces, each when the one before has left: what is not counted is one piece, not an answer of any size.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from protocol.frame import FramePart
from protocol.primitives import Buffer

READ_BUFFER_BYTES: Final = 256 * 1024
_SPARE_BUFFERS: Final = 16
TLS_PIECE_BYTES: Final = 256 * 1024

NOT_CONNECTED: Final = 1
PEER_IS_FULL: Final = 2
OUT_OF_TURN: Final = 4
DRAINING: Final = 8


class ReadGate:
    """Reads while no reason to pause is left. Every pause names its reason, so that none undoes another's."""

    __slots__ = ("_reasons", "_transport")

    def __init__(self) -> None:
        self._reasons = 0
        self._transport: asyncio.Transport | None = None

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
    """Parts that may outlive the read that brought them."""
    return [part._replace(data=memoryview(bytes(part.data))) for part in parts] if copy else list(parts)


class BufferPool:
    """`current` is what every connection reads into."""

    __slots__ = ("_spare", "current")

    def __init__(self) -> None:
        self.current = memoryview(bytearray(READ_BUFFER_BYTES))
        self._spare: list[memoryview] = []

    def retire(self) -> memoryview:
        """Takes `current` out of use: a write still refers to it."""
        retired = self.current
        self.current = self._spare.pop() if self._spare else memoryview(bytearray(READ_BUFFER_BYTES))
        return retired

    def give_back(self, buffers: list[memoryview]) -> None:
        self._spare.extend(buffers[: _SPARE_BUFFERS - len(self._spare)])
        buffers.clear()


class Outlet:
    """The writing side of a connection. After `write`, the buffers belong to the transport until it has sent them."""

    __slots__ = ("_is_tls", "_is_writing", "_on_sent", "_pool", "_retained", "_transport", "_unsent")

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._retained: list[memoryview] = []
        self._on_sent: list[Callable[[], None]] = []
        self._transport: asyncio.Transport | None = None
        self._is_tls = False
        self._is_writing = False
        self._unsent: deque[memoryview] = deque()
        """By TLS alone: what the transport was not given yet."""

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        # A transport pauses above its high-water mark, one of TLS already at it: 0 would stop that one for ever.
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        transport.set_write_buffer_limits(high=1 if self._is_tls else 0, low=0)

    def write(
        self, buffers: Sequence[Buffer], *, aliases_pool: bool, on_sent: Sequence[Callable[[], None]] = ()
    ) -> None:
        """`aliases_pool`: some of `buffers` are slices of the buffer that is being read into.

        `on_sent` are called once all that was written so far is sent, or will never be."""
        transport = self._transport
        self._on_sent += on_sent
        if transport is None:
            self._end()
            return
        if transport.is_closing():
            return
        if self._is_tls:
            self._unsent.extend(memoryview(buffer) for buffer in buffers if len(buffer))
            self._write_pieces(transport)
        elif len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)
        if aliases_pool and self._is_full(transport):
            self._retained.append(self._pool.retire())
        if self._on_sent and not self._is_full(transport):
            self._end()

    def _write_pieces(self, transport: asyncio.Transport) -> None:
        """While nothing waits. By TLS a write may call `resume_writing`, and so come here again."""
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

    def _is_full(self, transport: asyncio.Transport) -> bool:
        return self._is_writing or bool(self._unsent) or transport.get_write_buffer_size() > 0

    def on_drained(self) -> bool:
        """`resume_writing` at a low-water mark of 0. False: more has been given to the transport, or is being given,
        and another call comes when that is sent."""
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
        """What was written still leaves."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        unsent = [*self._unsent]
        self._unsent.clear()
        if unsent:
            transport.writelines(unsent)
        transport.close()

    def on_lost(self) -> None:
        """Nothing more will be sent."""
        self._transport = None
        self._unsent.clear()
        self._end()

    def _end(self) -> None:
        if self._retained:
            self._pool.give_back(self._retained)
        called, self._on_sent = self._on_sent, []
        for on_sent in called:
            on_sent()
