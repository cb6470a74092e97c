"""A TCP relay that can be broken at a chosen byte: what a network or a dying server does to a request in flight."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class BreakingRelay:
    """`cut_after` and `hold_after` count the bytes that pass in one direction from then on, over all connections."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._budget = {"up": -1, "down": -1}
        self._refuses = False
        self._holds = False
        self._holds_all = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.reached = asyncio.Event()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        self._close_all()
        await self._server.wait_closed()

    def cut_after(self, direction: str, count: int) -> None:
        """Then every connection is closed, and new ones are closed at once."""
        self._budget[direction], self._holds = count, False

    def hold_after(self, direction: str, count: int) -> None:
        """Then that connection passes nothing any more; new connections work."""
        self._budget[direction], self._holds = count, True

    def hold_all(self) -> None:
        """From now on nothing passes to the server, on no connection."""
        self._holds_all = True

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
                group.create_task(self._pass("up", reader, server_writer))
                group.create_task(self._pass("down", server_reader, writer))
        finally:
            for one in (writer, server_writer):
                one.close()
                self._writers.discard(one)

    async def _pass(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self._holds_all:
                    await self._until_closed(reader)
                    return
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

    @staticmethod
    async def _until_closed(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    def _close_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
