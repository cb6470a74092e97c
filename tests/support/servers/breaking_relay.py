"""A TCP relay that breaks at a chosen byte, as a network or a dying server breaks a request in flight."""

from __future__ import annotations

import asyncio
import contextlib
from enum import Enum
from types import TracebackType
from typing import Self

from tests.support.servers.stream_server import StreamServer


class Fault(Enum):
    """A fault of every connection, old and new, until `heal`."""

    UNAVAILABLE = "every request is answered with 503"
    STALLS = "nothing passes"
    TRUNCATES = "every answer ends in its middle"
    RESETS = "every connection is reset when it is used"
    SLOW = "one byte passes at a time, a hundred in a second"


_SLOW_S = 0.01
_UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BreakingRelay:
    """A relay to `target_port`.

    `cut_after` and `hold_after` count the bytes that pass in one direction after the call, over all connections."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server = StreamServer(self._serve)
        self._budget = {"up": -1, "down": -1}
        self._refuses = False
        self._holds = False
        self._fault: Fault | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._silent: set[asyncio.StreamWriter] = set()
        self.reached = asyncio.Event()
        self.url = ""

    async def __aenter__(self) -> Self:
        await self._server.start()
        self.port = self._server.port
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.stop()
        self._close_all()

    def cut_after(self, direction: str, count: int) -> None:
        """Closes every connection after `count` bytes. From then on, closes new connections at once."""
        self._budget[direction], self._holds = count, False

    def hold_after(self, direction: str, count: int) -> None:
        """Stops the connection that passes byte `count`: it stays open and passes nothing more. New ones work."""
        self._budget[direction], self._holds = count, True

    def silence_open(self) -> None:
        """Passes nothing more on the open connections, and does not close them. New connections work."""
        self._silent |= self._writers

    def break_with(self, fault: Fault) -> None:
        self._fault = fault

    def heal(self) -> None:
        """Ends the fault. Closes all connections, so the bytes in flight are lost."""
        self._fault = None
        self._close_all()

    @property
    def connections(self) -> int:
        """The number of connections that clients hold open."""
        return len(self._writers) // 2

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.close()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, server_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass("up", reader, server_writer, writer))
                group.create_task(self._pass("down", server_reader, writer, writer))
        finally:
            for one in (writer, server_writer):
                one.close()
                self._writers.discard(one)

    async def _pass(
        self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if await self._breaks(direction, reader, writer, client, data):
                    return
                if client in self._silent:
                    await self._until_closed(reader)
                    break
                budget = self._budget[direction]
                if 0 <= budget <= len(data):
                    writer.write(data[:budget])
                    self._budget[direction] = -1
                    self.reached.set()
                    if self._holds:
                        await self._until_closed(reader)
                        return
                    self._refuses = True
                    self._close_all()
                    return
                if budget > 0:
                    self._budget[direction] = budget - len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _breaks(
        self,
        direction: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        data: bytes,
    ) -> bool:
        """Applies the fault. Returns True when this direction of the connection has ended."""
        match self._fault:
            case Fault.STALLS:
                await self._until_closed(reader)
            case Fault.RESETS:
                client.transport.abort()
            case Fault.UNAVAILABLE:
                client.write(_UNAVAILABLE)
                client.close()
            case Fault.TRUNCATES if direction == "down":
                writer.write(data[: len(data) // 2])
                writer.close()
            case Fault.SLOW:
                for position in range(len(data)):
                    writer.write(data[position : position + 1])
                    await writer.drain()
                    await asyncio.sleep(_SLOW_S)
            case _:
                return False
        return True

    @staticmethod
    async def _until_closed(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    def _close_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
