"""Connects sockets to hosts by name: `Resolver` looks the addresses up, and each address is tried (RFC 8305).

* Connections that need the same name at the same time wait for one look-up. Its addresses are kept for `KEPT_S`.
* When a look-up fails, or takes longer than `PATIENCE_S`, the former addresses of the name stay in use. Only the answer
  that there is no such name ends that: another machine may have the address by then.
* A caller that leaves ends no look-up.
* The event loop's own `create_connection` waits for each address in turn. An address that does not answer would take
  the whole time of an attempt, each time again, and the next address would never be tried.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

NEXT_ADDRESS_S: Final = 0.25
"""The time after which the connection to another address begins beside the one in progress."""
KEPT_S: Final = 5.0
PATIENCE_S: Final = 1.0
MAX_NAMES: Final = 1_000
"""The names to remember. A forgotten name costs one look-up."""
_NO_SUCH_NAME: Final = (socket.EAI_NONAME, socket.EAI_NODATA)


class Question(NamedTuple):
    """The arguments of `socket.getaddrinfo`."""

    host: str | bytes | None
    port: str | bytes | int | None
    family: int = 0
    type: int = 0
    proto: int = 0
    flags: int = 0


Addresses = list[Any]
"""The result of `socket.getaddrinfo`, whose stubs disagree about its type."""
LookUp = Callable[[Question], Coroutine[Any, Any, Addresses]]


class _Known(NamedTuple):
    addresses: Addresses
    until_s: float


class _LookingUp(NamedTuple):
    task: asyncio.Task[Addresses]
    patience_ends_s: float


class Resolver:
    """`look_up` must end by itself. It raises `OSError` when it fails, and `ValueError` for what is no name."""

    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        self._known: dict[Question, _Known] = {}
        self._looking_up: dict[Question, _LookingUp] = {}

    async def resolve(self, asked: Question) -> Addresses:
        """Raises the errors of `look_up`."""
        now_s = asyncio.get_running_loop().time()
        known = self._known.get(asked)
        if known is not None and now_s < known.until_s:
            return known.addresses
        looking_up = self._looking_up.get(asked) or self._begin(asked, now_s)
        if known is not None:
            await asyncio.wait({looking_up.task}, timeout=max(0.0, looking_up.patience_ends_s - now_s))
            if not looking_up.task.done():
                return known.addresses
        return await asyncio.shield(looking_up.task)

    def _begin(self, asked: Question, now_s: float) -> _LookingUp:
        task = asyncio.get_running_loop().create_task(self._refreshed(asked))
        task.add_done_callback(_retrieve)
        looking_up = self._looking_up[asked] = _LookingUp(task, now_s + PATIENCE_S)
        return looking_up

    async def _refreshed(self, asked: Question) -> Addresses:
        try:
            addresses = await self._look_up(asked)
        except OSError as error:
            former = self._known.pop(asked, None)
            if former is None or error.errno in _NO_SUCH_NAME:
                raise
            addresses = former.addresses
        finally:
            del self._looking_up[asked]
        if len(self._known) >= MAX_NAMES:
            self._known.clear()
        self._known[asked] = _Known(addresses, asyncio.get_running_loop().time() + KEPT_S)
        return addresses


def _retrieve(task: asyncio.Task[Addresses]) -> None:
    """Keeps asyncio from logging an error that no caller waits for any more."""
    if not task.cancelled():
        task.exception()


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
