"""Connects a socket to a host of which a name may have several addresses (RFC 8305).

The event loop's own `create_connection` waits for each address in turn. An address that does not answer would take the
whole time of an attempt, each time again, and the next address would never be tried.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

NEXT_ADDRESS_S: Final = 0.25
"""The time after which the connection to another address begins beside the one in progress."""


async def connected_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is connected to one of the host's addresses. Raises `OSError` and `ValueError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return await connected_to(found)


async def connected_to(addresses: Sequence[AddrInfoType]) -> socket.socket:
    """Returns a socket that is connected to one of the addresses. Raises `OSError` and `ValueError`."""
    try:
        sock = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_S)
    except RuntimeError as error:  # uvloop raises it in place of some `OSError`s
        raise OSError(str(error)) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
