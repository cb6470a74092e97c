"""`EventLoop` is uvloop's event loop, with look-ups of host names in threads of its own.

uvloop resolves names in libuv's thread pool, which runs two look-ups at a time. `sock_connect` resolves there too, even
an address. So two look-ups that hang would stop all new connections.
"""

from __future__ import annotations

import socket
from typing import Final

import uvloop

from tiers.sockets import Addresses, Question, Resolver
from tiers.storage.activity import BlockingCalls

MAX_LOOK_UPS: Final = 64
"""The look-ups at a time. More of them wait."""
LOOK_UP_TIMEOUT_S: Final = 30.0


class EventLoop(uvloop.Loop):
    """Its `create_connection` resolves names in libuv's pool still: connect by `tiers.sockets`."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = BlockingCalls("resolver", MAX_LOOK_UPS)
        self._resolver = Resolver(self._look_up)

    async def getaddrinfo(
        self,
        host: str | bytes | None,
        port: str | bytes | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> Addresses:
        """Returns addresses as `socket.getaddrinfo` does. uvloop's `sock_connect` calls this too."""
        try:
            return socket.getaddrinfo(host, port, family, type, proto, flags | socket.AI_NUMERICHOST)
        except socket.gaierror:  # it is a name
            return await self._resolver.resolve(Question(host, port, family, type, proto, flags))

    def close(self) -> None:
        self._threads.close()
        super().close()

    async def _look_up(self, asked: Question) -> Addresses:
        return await self._threads.run(lambda _: socket.getaddrinfo(*asked), LOOK_UP_TIMEOUT_S)
