"""The connections of the admin port: strangers may reach it, so their number and their age are limited.

Without the limits, silent connections would take the files that the process may open, and no client would get in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from random import Random
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

logger = logging.getLogger(__name__)

MOST = 100
AGE_S = 60.0
"""The age at which a connection ends, also between two requests: its client then connects again."""
GRACE_S = 5.0
"""The time for the last answer."""
TLS_HANDSHAKE_S = 5.0
_ACCEPTS_AT_ONCE = 64
_RETRY_S = 1.0
"""The pause after a failed accept, for example if the process has no file descriptor left."""


class AdminConnections:
    """An async context manager that accepts connections. Its exit stops listening, and ends the handshakes.

    At the limit, a connection gives way that has sent no byte of a request, or any other one if there is none. It is
    chosen at random: if it were the oldest one, strangers who connect fast would end every request in progress."""

    def __init__(
        self,
        listener: socket.socket,
        server: web.Server,
        tls: Callable[[], ssl.SSLContext] | None = None,
        *,
        most: int = MOST,
        age_s: float = AGE_S,
        grace_s: float = GRACE_S,
        random: Random | None = None,
    ) -> None:
        """`server` owns the connections behind their handshakes, and ends them.

        `tls` returns the context of the next handshake. A context resumes only its own sessions. So if the files have
        changed, a client must show its certificate again."""
        self._listener = listener
        self._server = server
        self._tls = tls
        self._most = most
        self._age_s = age_s
        self._grace_s = grace_s
        self._random = random or Random()
        self._loop = asyncio.get_running_loop()
        self._tasks = asyncio.TaskGroup()
        self._connections: dict[_AdminConnection, None] = {}
        self._again: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> AdminConnections:
        await self._tasks.__aenter__()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            connection.stop()
        await self._tasks.__aexit__(None, None, None)

    def _accept(self) -> None:
        """Accepts connections. This is a callback, because a task that is cancelled during accept loses its socket."""
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                peer, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("connections to the admin port cannot be accepted, trying again: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._again = self._loop.call_later(_RETRY_S, self._loop.add_reader, self._listener, self._accept)
                return
            peer.setblocking(False)
            if len(self._connections) >= self._most:
                silent = [each for each in self._connections if not each.has_sent]
                self._random.choice(silent or list(self._connections)).abort()
            connection = _AdminConnection(self._server(), self._connections, self._grace_s)
            connection.opening = self._tasks.create_task(self._open(connection, peer))
            connection.opening.add_done_callback(partial(connection.on_opened, peer))
            connection.timer = self._loop.call_later(self._age_s, connection.end)

    async def _open(self, connection: _AdminConnection, peer: socket.socket) -> None:
        handshake_s = None if self._tls is None else TLS_HANDSHAKE_S
        with contextlib.suppress(OSError):  # the client left, or speaks no TLS
            await self._loop.connect_accepted_socket(
                lambda: connection,
                peer,
                ssl=None if self._tls is None else self._tls(),
                ssl_handshake_timeout=handshake_s,
            )


class _AdminConnection(asyncio.Protocol):
    """One connection: its handshake, and then aiohttp's `handler`. It counts from its accept."""

    opening: asyncio.Task[None]
    timer: asyncio.TimerHandle

    def __init__(self, handler: web.RequestHandler, connections: dict[_AdminConnection, None], grace_s: float) -> None:
        self.has_sent = False
        """Whether the client has sent a byte of a request."""
        self._handler = handler
        self._connections = connections
        self._grace_s = grace_s
        self._transport: asyncio.Transport | None = None
        connections[self] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._handler.connection_made(transport)

    def on_opened(self, peer: socket.socket, _: asyncio.Task[None]) -> None:
        """Ends a connection that failed. uvloop closes such a transport without a call of `connection_lost`."""
        if self._transport is None:
            self._forget()
            peer.close()

    def data_received(self, data: bytes) -> None:
        self.has_sent = True
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._transport is not None:
            self._handler.connection_lost(exc)

    def end(self) -> None:
        """Ends the connection after the request in progress."""
        if self._transport is None:
            self.abort()
            return
        self._handler.close()
        self.timer = asyncio.get_running_loop().call_later(self._grace_s, self.abort)

    def stop(self) -> None:
        """Ends a handshake. A connection behind it ends with its server."""
        if self._transport is None:
            self.abort()
        self._forget()

    def abort(self) -> None:
        self._forget()
        if self._transport is None:
            self.opening.cancel()
        else:
            self._transport.abort()

    def _forget(self) -> None:
        self.timer.cancel()
        self._connections.pop(self, None)


def is_own_fault(record: logging.LogRecord) -> bool:
    """A filter: a request that is no HTTP is the client's fault, and fills no log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
