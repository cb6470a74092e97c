"""The admin port: the page, its API, `/metrics` for Prometheus, and the probes of process managers and load balancers.

A process is live while its event loop runs (`/livez`). It serves while it can relay requests to the brokers: one of
them has a listener, and one has answered within `metadata.max.age.ms` plus 10 s (`/servez`). It is ready while,
besides, every broker has a listener, the brokers accept the proxy, and the metadata topic can be used (`/readyz`).
Other problems are alarms alone. Proxies share problems, such as lost metadata. Then a load balancer that asks `/readyz`
takes all proxies from the clients, also from those that need local records alone. So a load balancer asks `/servez`.
`/servez` and `/readyz` answer 503 with one line per reason.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from proxy.admin.api import CHILD_ENDPOINTS, ENDPOINTS, RELOAD, Route, adapter, routes_of
from proxy.admin.pages import page_routes
from proxy.admin.source import FactSource, OwnFacts
from proxy.process.admin.access import OPEN_TO_ALL, AdminAccess
from proxy.process.admin.connections import AdminConnections, is_own_fault
from proxy.process.live_settings import Reloaded
from proxy.wire.context import Address
from proxy.wire.server import bind, named_in_errors

logger = logging.getLogger(__name__)
logger.addFilter(is_own_fault)

Reasons = Callable[[], list[str]]
"""Returns reasons, one line each."""


@dataclass(frozen=True, slots=True)
class Health:
    """`not_serving` returns why the process can serve no client at all. `not_ready` returns these reasons too, and
    those of a process that serves: brokers without a listener, a rejected login, unusable metadata."""

    not_serving: Reasons
    not_ready: Reasons


Page = Callable[[web.Request], Awaitable[web.Response]]
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AdminPages(Protocol):
    """The source of the pages for programs: one process, or a supervisor that answers for all of its processes."""

    async def metrics(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""

    async def not_serving(self) -> list[str]: ...

    async def not_ready(self) -> list[str]: ...


class _OneProcess:
    def __init__(self, registry: CollectorRegistry, health: Health) -> None:
        self._registry = registry
        self._health = health

    async def metrics(self) -> bytes:
        return generate_latest(self._registry)

    async def not_serving(self) -> list[str]:
        return self._health.not_serving()

    async def not_ready(self) -> list[str]:
        return self._health.not_ready()


@asynccontextmanager
async def admin_http(
    at: Address | socket.socket,
    registry: CollectorRegistry,
    health: Health,
    facts: OwnFacts | None = None,
    access: AdminAccess = OPEN_TO_ALL,
) -> AsyncIterator[Address]:
    """Serves what the supervisor asks one process until the context exits, and yields the bound address.

    Raises `OSError` if the address cannot be bound."""
    routes = [] if facts is None else routes_of(CHILD_ENDPOINTS, facts)
    async with _served(at, _OneProcess(registry, health), routes, access) as bound:
        yield bound


@asynccontextmanager
async def admin_pages(
    at: Address | socket.socket,
    pages: AdminPages,
    facts: FactSource,
    access: AdminAccess = OPEN_TO_ALL,
    version: str = "",
    reload: Callable[[], Reloaded] | None = None,
) -> AsyncIterator[Address]:
    """Serves the page and the API of a proxy until the context exits, and yields the bound address.

    `reload` reads the settings again when a client asks. Raises `OSError` if the address cannot be bound."""
    routes = [*routes_of(ENDPOINTS, facts), *page_routes(facts, version)]
    async with _served(at, pages, routes, access, reload) as bound:
        yield bound


@asynccontextmanager
async def _served(
    at: Address | socket.socket,
    pages: AdminPages,
    routes: Sequence[Route],
    access: AdminAccess,
    reload: Callable[[], Reloaded] | None = None,
) -> AsyncIterator[Address]:
    """`at` is the address to bind, or a socket that is already listening."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=await pages.metrics(), headers={"Content-Type": _METRICS_TYPE})

    async def livez(request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def servez(request: web.Request) -> web.Response:
        return _probed(await pages.not_serving(), "serving\n")

    async def readyz(request: web.Request) -> web.Response:
        return _probed(await pages.not_ready(), "ready\n")

    async def reload_settings(request: web.Request) -> web.Response:
        assert reload is not None
        if (refusal := access.refusal_of_change(request)) is not None:
            return refusal
        result = reload()
        status = 422 if result.mistake else 200
        return web.Response(status=status, body=adapter(Reloaded).dump_json(result), content_type="application/json")

    def guarded(page: Page) -> Page:
        async def answer(request: web.Request) -> web.Response:
            refusal = access.refusal(request)
            return await page(request) if refusal is None else refusal

        return answer

    application = web.Application()
    application.add_routes([web.get("/livez", livez), web.get("/servez", servez), web.get("/readyz", readyz)])
    application.add_routes([web.get(path, guarded(page)) for path, page in [("/metrics", metrics), *routes]])
    if reload is not None:
        application.add_routes([web.post(RELOAD, reload_settings)])
    tls = None if access.tls is None else access.tls.current
    runner = web.AppRunner(application, access_log=None, logger=logger)
    await runner.setup()
    assert runner.server is not None
    try:
        with named_in_errors("[admin] port"):
            listener = at if isinstance(at, socket.socket) else bind(*at, reuse_port=False)
        async with AdminConnections(listener, runner.server, tls):
            bound: Address = listener.getsockname()[:2]
            if listener is not at:
                logger.info("the admin port is open", extra={"address": "{}:{}".format(*bound)})
            yield bound
    finally:
        await runner.cleanup()


def _probed(reasons: Sequence[str], well: str) -> web.Response:
    return web.Response(status=503, text="\n".join(reasons) + "\n") if reasons else web.Response(text=well)
