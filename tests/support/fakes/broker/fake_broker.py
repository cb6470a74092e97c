"""A broker on a real socket. The test, or `serve` of a subclass, decides what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from types import TracebackType
from typing import Self

from tests.support.fakes.broker.wire import TIMEOUT_S, Wire
from tests.support.servers.stream_server import StreamServer


class FakeBroker:
    """`accepted` returns connections in the order in which they came."""

    def __init__(self, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self._connections: asyncio.Queue[Wire] = asyncio.Queue()
        self._wires: list[Wire] = []
        self._server = StreamServer(self._on_connection, port=port, tls=tls)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop()

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Stops the broker. It may be started again, on the same port."""
        await self._server.stop()

    def drop_connections(self) -> None:
        self._server.drop_connections()

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", self.port)]

    async def accepted(self) -> Wire:
        async with asyncio.timeout(TIMEOUT_S):
            return await self._connections.get()

    @property
    def connections_made(self) -> int:
        return len(self._wires)

    async def serve(self, wire: Wire) -> None:
        """Serves a connection. This class does nothing, so the test decides."""
        self._connections.put_nowait(wire)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        self._wires.append(wire)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self.serve(wire)
