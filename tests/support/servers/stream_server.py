"""A TCP server on loopback that leaves no connection and no task behind when it closes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class StreamServer:
    """Runs `serve` for each connection, in a task of its own.

    `asyncio.start_server` starts that task after the connection exists. A server that closes in between, or while
    `serve` waits, would leave the connection open until the garbage collector reports it in some later test."""

    def __init__(
        self, serve: Serve, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self._serve = serve
        self._host = host
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = port

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Binds a free port the first time, and the same port afterwards."""
        self._server = await asyncio.start_server(self._accept, self._host, self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes the listener, aborts every connection, and cancels the tasks that serve them."""
        if self._server is None:
            return
        self._server.close()
        await self._server.wait_closed()
        self._server = None
        self.drop_connections()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._writers.clear()
        await asyncio.sleep(0)  # the loop tells the aborted connections that they are lost

    def drop_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
