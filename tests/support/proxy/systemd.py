"""systemd's end of the socket at which a service reports its state."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT_S = 60.0
_CREDENTIALS = struct.Struct("3i")


class Reports:
    """The reports that were sent to `address`, an abstract one if it begins with a zero byte."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(address)
        self.socket.settimeout(TIMEOUT_S)

    async def next(self) -> list[str]:
        """Waits for a report, and returns its lines."""
        return (await self.next_and_sender())[0]

    async def next_and_sender(self) -> tuple[list[str], int]:
        """Waits for a report, and returns its lines and the process that sent it."""
        return await asyncio.to_thread(self._read)

    def is_empty(self) -> bool:
        self.socket.setblocking(False)
        try:
            return not self.socket.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(TIMEOUT_S)

    def _read(self) -> tuple[list[str], int]:
        data, [(_, _, credentials)], _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
        pid, _, _ = _CREDENTIALS.unpack(credentials)
        return data.decode().splitlines(), pid


@contextmanager
def systemd(address: str) -> Iterator[Reports]:
    reports = Reports(address)
    with reports.socket:
        yield reports
