"""`HeldPorts`: the ports that a process binds before it changes anything, and at which it listens when it serves.

A held port refuses connections, so a client or a load balancer tries another proxy meanwhile.
"""

from __future__ import annotations

from socket import socket

from proxy.wire.context import Address
from proxy.wire.server import LISTEN_BACKLOG, bind


class HeldPorts:
    def __init__(self) -> None:
        self._held: dict[Address, socket] = {}

    def hold(self, host: str, port: int, *, reuse_port: bool) -> None:
        """Raises `OSError` if the port cannot be bound."""
        self._held[host, port] = bind(host, port, reuse_port=reuse_port, listens=False)

    def open(self, host: str, port: int, *, reuse_port: bool) -> socket:
        """Returns a listener at a held port or at another one. Raises `OSError`."""
        held = self._held.pop((host, port), None)
        if held is None:
            return bind(host, port, reuse_port=reuse_port)
        held.listen(LISTEN_BACKLOG)
        return held

    def close(self) -> None:
        """Releases the ports at which nothing listens."""
        for each in self._held.values():
            each.close()
        self._held.clear()
