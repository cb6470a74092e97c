"""`RangeReader` sends ranged GETs to the URLs of a store, over connections that it keeps open.

It knows neither signatures, retries nor deadlines: its caller signs the URL, and cancels a GET that takes too long. A
connection that was idle for so long that a firewall may have forgotten it is not used. A GET whose kept connection had
ended unnoticed is sent once more, on a new one.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from tiers.sockets import connected_socket
from tiers.storage.remote_storage_manager import Allocate
from tiers.storage.s3.range_connection import ByteRange, LostConnectionError, RangeConnection, UnansweredError

IDLE_S: Final = 15.0
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_SENDABLE: Final = re.compile("[!-~]+")
"""A URL without spaces and control characters, which would end the request line."""


class _Place(NamedTuple):
    """Where a connection leads to."""

    is_tls: bool
    host: str
    port: int


def new_memory(length: int) -> memoryview:
    return memoryview(bytearray(length))


class RangeReader:
    """Keeps at most `max_connections` open; more GETs wait. Must be created on the event loop that uses it.

    `tls` makes the context for https."""

    def __init__(self, max_connections: int, *, tls: Callable[[], ssl.SSLContext] = ssl.create_default_context) -> None:
        self._free = asyncio.Semaphore(max_connections)
        self._make_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[_Place, list[tuple[RangeConnection, asyncio.TimerHandle]]] = defaultdict(list)
        """With what closes them. The one that was used last is last, and is used again first: the others may close."""
        self._in_use: set[RangeConnection] = set()
        self._is_closed = False

    async def get(
        self, url: str, asked: ByteRange, moved: Callable[[], None], allocate: Allocate = new_memory
    ) -> memoryview:
        """Returns the bytes of the range, in memory of `allocate`. `moved` is called for each progress.

        Raises `LostConnectionError`, `UnexpectedAnswerError`, `OtherAnswerError` and `OSError`. Raises `ssl.SSLError`
        if the store is not trusted, and `ValueError` for a URL that cannot be sent."""
        place, request = _request(url, asked)

        async def get(connection: RangeConnection) -> memoryview:
            self._in_use.add(connection)
            try:
                return await connection.get(request, asked, moved, allocate)
            finally:
                self._in_use.discard(connection)
                if self._is_closed:
                    connection.abort()
                elif connection.is_usable:
                    closing = asyncio.get_running_loop().call_later(IDLE_S, connection.abort)
                    self._idle[place].append((connection, closing))

        async with self._free:
            kept = self._take_idle(place)
            if kept is not None:
                try:
                    return await get(kept)
                except UnansweredError:
                    pass  # the store closed it meanwhile
            return await get(await self._connect(place))

    async def close(self) -> None:
        """Closes all connections. GETs in progress and later ones raise `LostConnectionError`. Safe to call twice."""
        self._is_closed = True
        for connection in self._in_use.copy():
            connection.abort()
        for place in self._idle:
            while (kept := self._take_idle(place)) is not None:
                kept.abort()
        await asyncio.sleep(0)  # the loop ends the aborted connections

    def _take_idle(self, place: _Place) -> RangeConnection | None:
        """Returns a connection that may still be open."""
        while self._idle[place]:
            connection, closing = self._idle[place].pop()
            closing.cancel()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self, place: _Place) -> RangeConnection:
        if self._is_closed:
            raise LostConnectionError("the reader is closed")
        if place.is_tls and self._tls is None:
            self._tls = await asyncio.to_thread(self._make_tls)  # it reads the files of all trusted authorities
        opened = await connected_socket(place.host, place.port)
        tls, name = (self._tls, place.host) if place.is_tls else (None, None)
        _, connection = await asyncio.get_running_loop().create_connection(
            RangeConnection, sock=opened, ssl=tls, server_hostname=name
        )
        return connection


def _request(url: str, asked: ByteRange) -> tuple[_Place, bytes]:
    parts = urlsplit(url)
    if not _SENDABLE.fullmatch(url) or parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"{parts.scheme}://{parts.netloc} is no address of a store")
    default_port = _DEFAULT_PORTS[parts.scheme]
    name, port = parts.hostname, parts.port or default_port
    host = f"[{name}]" if ":" in name else name
    if port != default_port:
        host = f"{host}:{port}"
    target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    part = "" if asked.is_whole else f"Range: {asked.value}\r\n"
    # A presigned URL has no Authorization field, so an HTTP proxy on the way may answer from its cache: with an object
    # that the store has lost, or with an earlier one of the same key (RFC 9111 3.5).
    fields = f"Host: {host}\r\n{part}Accept-Encoding: identity\r\nCache-Control: no-cache\r\n"
    return _Place(parts.scheme == "https", name, port), f"GET {target} HTTP/1.1\r\n{fields}\r\n".encode("ascii")
