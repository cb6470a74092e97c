"""`RangeReader` sends ranged GETs to the URLs of a store, over connections that it keeps open.

It knows HTTP, and neither signatures, retries nor deadlines: its caller signs the URL, and cancels a GET that takes too
long. A connection that stays idle is closed before a firewall forgets it. A GET whose kept connection had ended
unnoticed is sent once more, on a new one.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from tiers.sockets import connected_socket
from tiers.storage.remote_storage_manager import Allocate
from tiers.storage.s3.http_proxy import HttpProxy, open_tunnel, proxy_of
from tiers.storage.s3.range_connection import (
    ByteRange,
    LostConnectionError,
    RangeAnswer,
    RangeConnection,
    UnansweredError,
)

IDLE_S: Final = 15.0
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_SENDABLE: Final = re.compile("[!-~]+")
"""A URL without spaces and control characters, which would end the request line."""


class TlsRefusedError(Exception):
    """The TLS handshake with the store failed, for example because of its certificate."""


class Route(NamedTuple):
    """Where a connection leads to, and by which proxy. Without TLS, a connection to a proxy leads to all stores."""

    is_tls: bool
    host: str
    port: int
    proxy: HttpProxy | None


def new_memory(length: int) -> memoryview:
    return memoryview(bytearray(length))


class RangeReader:
    """Keeps at most `max_connections` open; more GETs wait. Must be created on the event loop that uses it.

    `tls` makes the context for https. `proxy_of` names the proxy for a URL; it is asked once per host."""

    def __init__(
        self,
        max_connections: int,
        *,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        proxy_of: Callable[[str], HttpProxy | None] = proxy_of,
    ) -> None:
        self._proxy_of = proxy_of
        self._proxies: dict[tuple[str, str], HttpProxy | None] = {}
        """By the scheme and the host with its port."""
        self._places = asyncio.Semaphore(max_connections)
        self._make_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[Route, list[RangeConnection]] = {}
        self._in_use: set[RangeConnection] = set()
        self._is_closed = False

    @property
    def idle_count(self) -> int:
        """The number of open connections that no GET uses."""
        return sum(connection.is_usable for idle in self._idle.values() for connection in idle)

    async def get(
        self, url: str, asked: ByteRange, moved: Callable[[], None], allocate: Allocate = new_memory
    ) -> RangeAnswer:
        """Returns the answer to a GET of the range, whose bytes are in memory of `allocate`.

        `moved` is called for each progress.

        Raises `LostConnectionError`, `UnexpectedAnswerError`, `MalformedAnswerError`, `TlsRefusedError` and `OSError`.
        Raises `ValueError` for a URL that cannot be sent."""
        route, request = self._request(url, asked)

        def get(connection: RangeConnection) -> Coroutine[None, None, RangeAnswer]:
            return connection.get(request, asked, moved, allocate)

        async with self._places:
            kept = self._take_idle(route)
            if kept is not None:
                try:
                    return await self._get_by(kept, route, get)
                except UnansweredError:
                    pass  # the store closed it meanwhile
            return await self._get_by(await self._connect(route), route, get)

    async def close(self) -> None:
        """Closes all connections. GETs in progress and later ones raise `LostConnectionError`. Safe to call twice."""
        self._is_closed = True
        for connection in self._in_use:
            connection.abort()
        for route in self._idle:
            while (idle := self._take_idle(route)) is not None:
                idle.abort()
        await asyncio.sleep(0)  # the loop ends the aborted connections

    async def _get_by(
        self,
        connection: RangeConnection,
        route: Route,
        get: Callable[[RangeConnection], Coroutine[None, None, RangeAnswer]],
    ) -> RangeAnswer:
        self._in_use.add(connection)
        try:
            return await get(connection)
        finally:
            self._in_use.discard(connection)
            if self._is_closed:
                connection.abort()
            elif connection.is_usable:
                self._keep(route, connection)

    def _take_idle(self, route: Route) -> RangeConnection | None:
        """Returns the connection that was used last. So the others become idle for long, and close."""
        idle = self._idle.get(route)
        if not idle:
            return None
        connection = idle.pop()
        assert connection.idle_timer is not None
        connection.idle_timer.cancel()
        return connection

    def _keep(self, route: Route, connection: RangeConnection) -> None:
        idle = self._idle.setdefault(route, [])
        idle.append(connection)

        def close() -> None:
            idle.remove(connection)
            connection.abort()

        connection.idle_timer = asyncio.get_running_loop().call_later(IDLE_S, close)

    async def _connect(self, route: Route) -> RangeConnection:
        if self._is_closed:
            raise LostConnectionError("the reader is closed")
        tls = await self._tls_context() if route.is_tls else None
        opened = await _opened(route)
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                RangeConnection, sock=opened, ssl=tls, server_hostname=route.host if route.is_tls else None
            )
        except ssl.SSLError as error:
            raise TlsRefusedError(str(error)) from error
        return connection

    def _request(self, url: str, asked: ByteRange) -> tuple[Route, bytes]:
        parts = urlsplit(url)
        if not _SENDABLE.fullmatch(url) or parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"{parts.scheme}://{parts.netloc} is no address of a store")
        place = parts.scheme, parts.netloc
        if place not in self._proxies:
            self._proxies[place] = self._proxy_of(url)
        proxy = self._proxies[place]
        default_port = _DEFAULT_PORTS[parts.scheme]
        name, port, is_tls = parts.hostname, parts.port or default_port, parts.scheme == "https"
        host = f"[{name}]" if ":" in name else name
        if port != default_port:
            host = f"{host}:{port}"
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        fields = asked.header()
        if proxy is None or is_tls:
            route = Route(is_tls, name, port, proxy)
        else:
            route = Route(is_tls, proxy.host, proxy.port, proxy)
            target = f"http://{host}{target}"
            fields += proxy.header()
        # A presigned URL has no Authorization field, so an HTTP proxy on the way may answer from its cache: with an
        # object that the store has lost, or with an earlier one of the same key (RFC 9111 3.5).
        fields += "Accept-Encoding: identity\r\nCache-Control: no-cache\r\n"
        head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n"
        return route, head.encode("ascii")

    async def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = await asyncio.to_thread(self._make_tls)  # it reads the files of all trusted authorities
        return self._tls


async def _opened(route: Route) -> socket.socket:
    """Returns a socket whose next bytes reach the route's host. Raises `OSError`."""
    if route.proxy is None or not route.is_tls:
        return await connected_socket(route.host, route.port)
    opened = await connected_socket(route.proxy.host, route.proxy.port)
    try:
        await open_tunnel(opened, route.proxy, route.host, route.port)
    except BaseException:
        opened.close()
        raise
    return opened
