"""A TCP relay that passes a limited number of bytes per second, over all its connections together.

It takes what it may pass and no more, so the sender sees the rate: the kernel holds little for a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import TracebackType
from typing import Self

from tests.support.servers.stream_server import StreamServer

_PIECE_BYTES = 16 << 10
_RECEIVE_BUFFER_BYTES = 64 << 10


class TokenBucket:
    """Gives `rate` bytes per second to its takers, in the order in which they ask."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at_s = 0.0
        self.taken = 0

    async def take(self, count: int) -> None:
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + count / self._rate
        self.taken += count
        await asyncio.sleep(self._free_at_s - now_s)


class ThrottlingRelay:
    """A relay to `target_port`. The bytes to the server and those back have a bucket each."""

    def __init__(self, target_port: int, bytes_per_second: float, port: int = 0) -> None:
        self._target_port = target_port
        self._server = StreamServer(self._serve, port=port)
        self.up, self.down = TokenBucket(bytes_per_second), TokenBucket(bytes_per_second)
        self.passes = asyncio.Event()
        """While it is cleared, no byte passes, and all connections stay open."""
        self.passes.set()
        self.url = ""

    async def __aenter__(self) -> Self:
        await self._server.start()
        listener = self._server._server
        assert listener is not None
        for one in listener.sockets:  # connections inherit the size
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self.url = f"http://127.0.0.1:{self._server.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(
                "127.0.0.1", self._target_port, limit=_PIECE_BYTES
            )
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(self.up, reader, server_writer))
                group.create_task(self._pass(self.down, server_reader, writer))
        finally:
            server_writer.close()
            writer.close()

    async def _pass(self, bucket: TokenBucket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                await bucket.take(len(data))
                await self.passes.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
