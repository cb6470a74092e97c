"""The routes of the page, and its static files. The page changes nothing: every route is a GET."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from typing import Final

from aiohttp import web

from proxy.admin.api import ENDPOINTS, number, partition_number, topic_query
from proxy.admin.html import Renderer
from proxy.admin.source import FactSource, FactsUnavailableError

Handler = Callable[[web.Request], Awaitable[web.Response]]

STATIC: Final = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
HEADERS: Final = {
    # Nothing is loaded from elsewhere, and a text that escapes its place runs no script.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@cache
def static_file(name: str) -> bytes:
    return (files("proxy.admin") / "static" / name).read_bytes()


def page_routes(source: FactSource, version: str) -> list[tuple[str, Handler]]:
    """Returns the paths and the handlers."""
    renderer = Renderer(version)

    def page(heading: str, tab: str, render: Callable[[web.Request], Awaitable[str | None]]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            status, text = 200, None
            try:
                text = await render(request)
                if text is None:
                    status, text = (
                        404,
                        renderer.message("Not found", "There is no such topic, partition or page of the runbook.", tab),
                    )
            except FactsUnavailableError as error:
                status, text = 503, renderer.message(heading, f"Not available now: {error}.", tab)
            except web.HTTPBadRequest as error:
                status, text = 400, renderer.message("The address is wrong", (error.text or "").strip(), tab)
            return web.Response(status=status, text=text, content_type="text/html", headers=HEADERS)

        return answer

    async def overview(request: web.Request) -> str:
        return renderer.overview(await source.overview())

    async def topics(request: web.Request) -> str:
        return renderer.topics(await source.topics(topic_query(request)))

    async def topic(request: web.Request) -> str | None:
        found = await source.topic(request.match_info["topic"], number(request, "page", 1))
        return None if found is None else renderer.topic(found)

    async def partition(request: web.Request) -> str | None:
        name = request.match_info["topic"]
        found = await source.partition(name, partition_number(request), number(request, "from", 0))
        return None if found is None else renderer.partition(name, found)

    async def readers(request: web.Request) -> str:
        return renderer.readers(await source.readers())

    async def settings(request: web.Request) -> str:
        return renderer.settings(await source.settings())

    async def errors(request: web.Request) -> str:
        return renderer.errors(await source.errors())

    async def runbook(request: web.Request) -> str | None:
        return renderer.runbook(request.match_info["page"])

    async def nothing(request: web.Request) -> web.Response:
        if f"{request.path}/".startswith("/api/"):
            known = [each.path for each in ENDPOINTS]
            return web.json_response({"error": "there is no such page", "pages": known}, status=404)
        text = renderer.message("Not found", "There is no such page.")
        return web.Response(status=404, text=text, content_type="text/html", headers=HEADERS)

    async def static(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in STATIC:
            return web.Response(status=404, text="not found\n")
        return web.Response(
            body=static_file(name),
            content_type=STATIC[name],
            charset="utf-8",
            headers={**HEADERS, "Cache-Control": "max-age=60"},
        )

    return [
        ("/", page("Overview", "overview", overview)),
        ("/topics", page("Topics", "topics", topics)),
        ("/topics/{topic}", page("Topic", "topics", topic)),
        ("/topics/{topic}/{partition}", page("Partition", "topics", partition)),
        ("/readers", page("Readers", "readers", readers)),
        ("/settings", page("Settings", "settings", settings)),
        ("/errors", page("Errors", "errors", errors)),
        ("/runbook/{page}", page("Runbook", "overview", runbook)),
        ("/static/{name}", static),
        ("/{path:.*}", nothing),
    ]
