"""The admin port: `/metrics` for Prometheus, `/livez` and `/readyz` for a process manager such as Kubernetes.

A process is live while its event loop runs. A process is ready while clients may connect to it: it knows the cluster,
it found no problem, and it is not stopping. If a process is not ready, `/readyz` answers 503 with one line per reason.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from proxy.wire.context import Address

NotReady = Callable[[], list[str]]
"""Returns the reasons why clients should not connect to this process, one line each. Ready: no reasons."""

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AdminPages(Protocol):
    """The source of the pages: one process, or a supervisor that answers for all of its processes."""

    async def metrics(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""

    async def not_ready(self) -> list[str]: ...


class _OneProcess:
    def __init__(self, registry: CollectorRegistry, not_ready: NotReady) -> None:
        self._registry = registry
        self._not_ready = not_ready

    async def metrics(self) -> bytes:
        return generate_latest(self._registry)

    async def not_ready(self) -> list[str]:
        return self._not_ready()


@asynccontextmanager
async def admin_http(
    at: Address | socket.socket, registry: CollectorRegistry, not_ready: NotReady
) -> AsyncIterator[Address]:
    """Serves the pages of one process until the context exits, and yields the bound address.

    Raises `OSError` if the address cannot be bound."""
    async with admin_pages(at, _OneProcess(registry, not_ready)) as bound:
        yield bound


@asynccontextmanager
async def admin_pages(at: Address | socket.socket, pages: AdminPages) -> AsyncIterator[Address]:
    """Serves `pages` until the context exits, and yields the bound address.

    `at` is the address to bind, or a socket that is already listening. Raises `OSError` if it cannot be bound."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=await pages.metrics(), headers={"Content-Type": _METRICS_TYPE})

    async def livez(request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def readyz(request: web.Request) -> web.Response:
        reasons = await pages.not_ready()
        return web.Response(status=503, text="\n".join(reasons) + "\n") if reasons else web.Response(text="ready\n")

    application = web.Application()
    application.add_routes([web.get("/metrics", metrics), web.get("/livez", livez), web.get("/readyz", readyz)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await (web.SockSite(runner, at) if isinstance(at, socket.socket) else web.TCPSite(runner, *at)).start()
        bound: Address = runner.addresses[0][:2]
        yield bound
    finally:
        await runner.cleanup()
