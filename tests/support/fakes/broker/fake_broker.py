"""A broker on a real socket. The test, or `serve` of a subclass, decides what it sends."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from tests.support.fakes.broker.wire import TIMEOUT_S, Wire


class FakeBroker:
    """`accepted` returns connections in the order in which they came."""

    def __init__(self) -> None:
        self._connections: asyncio.Queue[Wire] = asyncio.Queue()
        self._wires: list[Wire] = []
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for wire in self._wires:
            await wire.close()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops the broker. It may be started again, on the same port."""
        assert self._server is not None
        self._server.close()
        self.drop_connections()
        await self._server.wait_closed()

    def drop_connections(self) -> None:
        for wire in self._wires:
            wire.abort()

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
