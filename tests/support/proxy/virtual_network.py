"""Sockets in virtual time: the transports of the proxy, and the peers at their other ends, which a test scripts.

Only the sockets are fake. The protocol classes, handlers and timers are the product's own, and run on a `VirtualLoop`.
A run is the same every time.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from protocol.primitives import Buffer
from tests.support.simulation.loop import VirtualLoop

SOCKET_BYTES = 8 * 1024
"""The bytes that a socket takes while the peer does not read."""


class Peer:
    """The other end of a connection of the proxy: a client, or a broker."""

    def __init__(self) -> None:
        self.received = bytearray()
        """The bytes that the peer has read."""
        self.has_ended = False
        """Whether the proxy has closed the connection, and the peer has read all bytes before that."""
        self.reads = True
        self.on_received: Callable[[], object] = lambda: None
        self.socket: bytearray = bytearray()
        """The bytes of the proxy that the peer has not read."""
        self.transport: VirtualTransport

    def send(self, data: bytes) -> None:
        self.transport.take(data)

    def half_close(self) -> None:
        self.transport.take_end()

    def reset(self) -> None:
        self.transport.take_reset()

    def stall(self) -> None:
        self.reads = False

    def resume(self) -> None:
        self.reads = True
        self.read()

    def read(self, size_bytes: int | None = None) -> None:
        """Reads what the socket has, or as many bytes of it."""
        taken = self.socket[:size_bytes]
        del self.socket[: len(taken)]
        self.received += taken
        if taken:
            self.transport.on_room()
        self.has_ended = self.transport.has_closed and not self.socket
        if taken or self.has_ended:
            self.on_received()

    def on_bytes(self) -> None:
        if self.reads:
            self.read()


class VirtualTransport(asyncio.Transport):
    """The proxy's end of a connection. As a real transport, it keeps the buffers of a write until they have left."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.BufferedProtocol, peer: Peer, name: Any = None) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._peer = peer
        self._name = name or ("192.0.2.1", 40_000)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._high = 64 * 1024
        self._low = 16 * 1024
        self._reads = True
        self._is_paused = False
        self._is_closing = False
        self.has_closed = False
        self._incoming = bytearray()
        self._ends = False
        """Whether the peer sends nothing more."""
        self._has_told_end = False
        self._delivery: object | None = None
        self.most_unsent_bytes = 0
        peer.transport = self
        protocol.connection_made(self)

    # The proxy's side.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._name if name == "peername" else default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = self._high if high is None else high
        self._low = self._low if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def write(self, data: Buffer) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        if self._is_closing:
            return
        for data in list_of_data:
            if len(data):
                self._unsent.append(memoryview(data))
                self._unsent_bytes += len(data)
        self._flush()
        size_bytes = self.get_write_buffer_size()
        self.most_unsent_bytes = max(self.most_unsent_bytes, size_bytes)
        if size_bytes > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        self._deliver_soon()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if not self._unsent:
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        self._drop_unsent()
        self._is_closing = True
        self._loop.call_soon(self._end, None)

    def _flush(self) -> None:
        before = len(self._peer.socket)
        while self._unsent and len(self._peer.socket) < SOCKET_BYTES:
            data = self._unsent.popleft()
            room = SOCKET_BYTES - len(self._peer.socket)
            self._peer.socket += data[:room]
            self._unsent_bytes -= min(room, len(data))
            if len(data) > room:
                self._unsent.appendleft(data[room:])
        if len(self._peer.socket) > before:
            self._loop.call_soon(self._peer.on_bytes)

    def _end(self, error: Exception | None) -> None:
        if self.has_closed:
            return
        self.has_closed = self._is_closing = True
        self._drop_unsent()
        self._protocol.connection_lost(error)
        self._peer.on_bytes()

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    # The peer's side.

    def on_room(self) -> None:
        """The peer has read, so the socket takes more bytes of the proxy."""
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self.has_closed:
            return
        self._flush()
        if self._is_paused and self.get_write_buffer_size() <= self._low:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing and not self._unsent:
            self._end(None)

    def take(self, data: bytes) -> None:
        if not self._is_closing and not self._ends:
            self._incoming += data
            self._deliver_soon()

    def take_end(self) -> None:
        self._ends = True
        self._deliver_soon()

    def take_reset(self) -> None:
        self._drop_unsent()
        self._is_closing = True
        self._loop.call_soon(self._end, ConnectionResetError("the peer has reset the connection"))

    def _deliver_soon(self) -> None:
        if self._delivery is None:
            self._delivery = self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        if not self._reads or self._is_closing:
            return
        if self._incoming:
            buffer = cast(memoryview, self._protocol.get_buffer(-1))
            count = min(len(buffer), len(self._incoming))
            buffer[:count] = self._incoming[:count]
            del self._incoming[:count]
            self._protocol.buffer_updated(count)
            if self._incoming or self._ends:
                self._deliver_soon()
        elif self._ends and not self._has_told_end:
            self._has_told_end = True
            if not self._protocol.eof_received():
                self.close()


class VirtualNetwork(VirtualLoop):
    """An event loop whose outgoing connections lead to peers. `brokers` are the peers, in the order of connecting."""

    def __init__(self) -> None:
        super().__init__()
        self.brokers: list[Peer] = []
        self.on_connection: Callable[[Peer], object] = lambda peer: None
        self.refuses = False
        self.count: Callable[[], int] = lambda: 0
        """Counts some work. `most_per_callback` is the largest growth of it in one callback."""
        self.most_per_callback = 0
        self.transports: list[VirtualTransport] = []

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        if self.refuses:
            raise ConnectionRefusedError(address)

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], Any],
        *,
        sock: socket.socket,
        ssl: object = None,
        server_hostname: str | None = None,
    ) -> tuple[VirtualTransport, Any]:
        sock.close()
        protocol, peer = protocol_factory(), Peer()
        transport = VirtualTransport(self, protocol, peer)
        self.transports.append(transport)
        self.brokers.append(peer)
        self.on_connection(peer)
        return transport, protocol

    def _run(self, one: Any) -> None:
        before = self.count()
        super()._run(one)
        self.most_per_callback = max(self.most_per_callback, self.count() - before)

    def accept(self, protocol: asyncio.BufferedProtocol, client: Peer) -> VirtualTransport:
        """Connects a client to the protocol that the proxy made for it."""
        transport = VirtualTransport(self, protocol, client, ("192.0.2.1", 40_000 + len(self.transports)))
        self.transports.append(transport)
        return transport
