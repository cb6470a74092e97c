"""A socket that sends and receives frames, and a client of the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

from protocol.header import build_request_header
from protocol.primitives import INT32

TIMEOUT_S = 60
OPAQUE = 12
"""The key of an API that the proxy does not look into."""


def frame(payload: bytes) -> bytes:
    return INT32.pack(len(payload)) + payload


def request(api_key: int, api_version: int, correlation_id: int, body: bytes = b"") -> bytes:
    return build_request_header(api_key, api_version, correlation_id, "test") + body


def response(correlation_id: int, body: bytes = b"") -> bytes:
    return INT32.pack(correlation_id) + body


class Wire:
    """Sends and receives frames on one socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *payloads: bytes) -> None:
        await self.send_raw(b"".join(map(frame, payloads)))

    async def send_raw(self, data: bytes) -> None:
        self._writer.write(data)
        async with asyncio.timeout(TIMEOUT_S):
            await self._writer.drain()

    async def receive(self) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            (size,) = INT32.unpack(await self._reader.readexactly(4))
            return await self._reader.readexactly(size)

    async def receive_when_it_comes(self) -> bytes:
        (size,) = INT32.unpack(await self._reader.readexactly(4))
        return await self._reader.readexactly(size)

    async def receive_raw(self, count: int) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            return await self._reader.readexactly(count)

    async def ended(self) -> bytes:
        """Returns the bytes that came before the other side closed the connection, cleanly or not."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            async with asyncio.timeout(TIMEOUT_S):
                return await self._reader.read()
        return b""

    def half_close(self) -> None:
        self._writer.write_eof()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def reset(self) -> None:
        """Closes with a TCP reset, so that the other side learns of it at once."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(port: int, *, receive_buffer_bytes: int = 0) -> AsyncIterator[Wire]:
    """Yields a client of the proxy. `receive_buffer_bytes` limits the bytes that the kernel buffers for the client."""
    sock = socket.socket()
    if receive_buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    wire = Wire(*await asyncio.open_connection(sock=sock, limit=16 * 1024))
    try:
        yield wire
    finally:
        await wire.close()
