"""The admin port: `/metrics` for Prometheus, `/errors` for people, `/livez` and `/readyz` for a process manager.

A process is live while its event loop runs. A process is ready while clients may connect to it: it knows the cluster,
it found no problem, and it is not stopping. If a process is not ready, `/readyz` answers 503 with one line per reason.
`/errors` has the last undecodable frames and the last connections that were closed, refused or throttled, as JSON.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from proxy.process.admin_access import OPEN_TO_ALL, AdminAccess
from proxy.process.admin_connections import AdminConnections, is_own_fault
from proxy.wire.context import Address
from proxy.wire.error_log import Incident
from proxy.wire.server import bind

logger = logging.getLogger(__name__)
logger.addFilter(is_own_fault)

NotReady = Callable[[], list[str]]
"""Returns the reasons why clients should not connect to this process, one line each. Ready: no reasons."""

Errors = Callable[[], Sequence[Incident]]
Page = Callable[[web.Request], Awaitable[web.Response]]

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AdminPages(Protocol):
    """The source of the pages: one process, or a supervisor that answers for all of its processes."""

    async def metrics(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""

    async def not_ready(self) -> list[str]: ...

    async def errors(self) -> list[dict[str, object]]:
        """Returns the entries of `/errors`, the oldest first."""


class _OneProcess:
    def __init__(self, registry: CollectorRegistry, not_ready: NotReady, errors: Errors) -> None:
        self._registry = registry
        self._not_ready = not_ready
        self._errors = errors

    async def metrics(self) -> bytes:
        return generate_latest(self._registry)

    async def not_ready(self) -> list[str]:
        return self._not_ready()

    async def errors(self) -> list[dict[str, object]]:
        return [asdict(incident) for incident in self._errors()]


@asynccontextmanager
async def admin_http(
    at: Address | socket.socket,
    registry: CollectorRegistry,
    not_ready: NotReady,
    errors: Errors = list,
    access: AdminAccess = OPEN_TO_ALL,
) -> AsyncIterator[Address]:
    """Serves the pages of one process until the context exits, and yields the bound address.

    Raises `OSError` if the address cannot be bound."""
    async with admin_pages(at, _OneProcess(registry, not_ready, errors), access) as bound:
        yield bound


@asynccontextmanager
async def admin_pages(
    at: Address | socket.socket, pages: AdminPages, access: AdminAccess = OPEN_TO_ALL
) -> AsyncIterator[Address]:
    """Serves `pages` until the context exits, and yields the bound address.

    `at` is the address to bind, or a socket that is already listening. Raises `OSError` if it cannot be bound."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=await pages.metrics(), headers={"Content-Type": _METRICS_TYPE})

    async def livez(request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def readyz(request: web.Request) -> web.Response:
        reasons = await pages.not_ready()
        return web.Response(status=503, text="\n".join(reasons) + "\n") if reasons else web.Response(text="ready\n")

    async def errors(request: web.Request) -> web.Response:
        return web.json_response({"errors": await pages.errors()})

    def guarded(page: Page) -> Page:
        async def answer(request: web.Request) -> web.Response:
            if access.allows(request):
                return await page(request)
            return web.Response(status=401, text="unauthorized\n", headers={"WWW-Authenticate": "Bearer"})

        return answer

    application = web.Application()
    application.add_routes(
        [
            web.get("/metrics", guarded(metrics)),
            web.get("/errors", guarded(errors)),
            web.get("/livez", livez),
            web.get("/readyz", readyz),
        ]
    )
    runner = web.AppRunner(application, access_log=None, logger=logger)
    await runner.setup()
    assert runner.server is not None
    try:
        listener = at if isinstance(at, socket.socket) else bind(*at, reuse_port=False)
        async with AdminConnections(listener, runner.server, access.tls):
            bound: Address = listener.getsockname()[:2]
            yield bound
    finally:
        await runner.cleanup()
