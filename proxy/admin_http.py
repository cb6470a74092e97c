"""The admin port: `/metrics` for Prometheus, `/livez` and `/readyz` for whoever starts and stops processes.

Live means that the event loop turns. Ready means that clients may be sent here: the cluster is known, nothing is amiss
that `/readyz` would name, and the process is not about to stop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from proxy.context import Address

NotReady = Callable[[], list[str]]
"""Why clients should not be sent here, a line per reason; empty when ready."""

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@asynccontextmanager
async def admin_http(host: str, port: int, registry: CollectorRegistry, not_ready: NotReady) -> AsyncIterator[Address]:
    """Serves until left; yields the bound address. Raises `OSError` when it cannot bind."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": _METRICS_TYPE})

    async def livez(request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def readyz(request: web.Request) -> web.Response:
        reasons = not_ready()
        return web.Response(status=503, text="\n".join(reasons) + "\n") if reasons else web.Response(text="ready\n")

    application = web.Application()
    application.add_routes([web.get("/metrics", metrics), web.get("/livez", livez), web.get("/readyz", readyz)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound: Address = runner.addresses[0][:2]
        yield bound
    finally:
        await runner.cleanup()
