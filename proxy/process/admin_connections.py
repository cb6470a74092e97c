"""The connections of the admin port: strangers may reach it, so their number and their age are limited.

Without the limits, silent connections would take the files that the process may open, and no client would get in.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

MOST = 100
AGE_S = 60.0
"""The age at which a connection ends, also between two requests: its client then connects again."""
GRACE_S = 5.0
"""The time for the last answer."""
TLS_HANDSHAKE_S = 5.0


class AdminConnections:
    """Makes the protocol of each connection. At the limit, the oldest connection gives way: requests are short."""

    def __init__(self, server: web.Server, *, most: int = MOST, age_s: float = AGE_S, grace_s: float = GRACE_S) -> None:
        self._server = server
        self._most = most
        self._age_s = age_s
        self._grace_s = grace_s
        self._timers: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """The oldest first. A connection that has ended stays until its time."""

    def __call__(self) -> asyncio.BaseProtocol:
        while len(self._timers) >= self._most:
            self._abort(next(iter(self._timers)))
        handler = self._server()
        self._timers[handler] = asyncio.get_running_loop().call_later(self._age_s, self._end, handler)
        return handler

    def _end(self, handler: web.RequestHandler) -> None:
        handler.close()
        self._timers[handler] = asyncio.get_running_loop().call_later(self._grace_s, self._abort, handler)

    def _abort(self, handler: web.RequestHandler) -> None:
        self._timers.pop(handler).cancel()
        if handler.transport is not None:
            handler.transport.abort()

    def close(self) -> None:
        """Forgets the connections, which their server ends."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


def is_own_fault(record: logging.LogRecord) -> bool:
    """A filter: a request that is no HTTP is the client's fault, and fills no log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
