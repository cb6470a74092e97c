"""The API under `/api/v1/`: the facts as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, get_args

from aiohttp import web
from pydantic import TypeAdapter

from proxy.admin.counts import ProcessReport
from proxy.admin.facts import (
    ClusterFacts,
    ErrorsPage,
    Overview,
    PartitionPage,
    ReadersPage,
    SettingsPage,
    TopicPage,
    TopicQuery,
    TopicsPage,
    TopicState,
)
from proxy.admin.source import FactsUnavailableError, TierFacts

PREFIX: Final = "/api/v1"
RELOAD: Final = f"{PREFIX}/reload"
SORTS: Final = ("name", "size", "backlog", "age", "alarms")
STATES: Final = get_args(TopicState)
MAX_SEARCH: Final = 249
"""The longest name of a topic in Kafka."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    answer: type[Any]
    ask: Callable[[Any, web.Request], Awaitable[Any]]
    """Asks the source of the route."""


def topic_query(request: web.Request) -> TopicQuery:
    """Raises `web.HTTPBadRequest` for a value that is not one of the choices."""
    query = request.query
    state, sort = query.get("state", ""), query.get("sort", "name")
    if state and state not in STATES:
        raise web.HTTPBadRequest(text=f"state is one of {', '.join(STATES)}\n")
    if sort not in SORTS:
        raise web.HTTPBadRequest(text=f"sort is one of {', '.join(SORTS)}\n")
    search = query.get("search", "")[:MAX_SEARCH]
    return TopicQuery(search, state, sort, query.get("descending", "") == "true", number(request, "page", 1))  # type: ignore[arg-type]  # checked above


def number(request: web.Request, name: str, default: int) -> int:
    """Returns a number of the query that is not negative. Raises `web.HTTPBadRequest`."""
    return _whole(request.query.get(name, str(default)), name)


def partition_number(request: web.Request) -> int:
    return _whole(request.match_info["partition"], "partition")


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise web.HTTPBadRequest(text=f"{name} is a whole number\n")
    return int(text)


TIER_ENDPOINTS: Final = (
    Endpoint(f"{PREFIX}/topics", TopicsPage, lambda source, request: source.topics(topic_query(request))),
    Endpoint(
        f"{PREFIX}/topics/{{topic}}",
        TopicPage,
        lambda source, request: source.topic(request.match_info["topic"], number(request, "page", 1)),
    ),
    Endpoint(
        f"{PREFIX}/topics/{{topic}}/{{partition}}",
        PartitionPage,
        lambda source, request: source.partition(
            request.match_info["topic"], partition_number(request), number(request, "from", 0)
        ),
    ),
    Endpoint(f"{PREFIX}/readers", ReadersPage, lambda source, request: source.readers()),
    Endpoint(f"{PREFIX}/errors", ErrorsPage, lambda source, request: source.errors()),
)
"""The questions that a process and a proxy answer (`TierFacts`)."""
ENDPOINTS: Final = (
    Endpoint(f"{PREFIX}/overview", Overview, lambda source, request: source.overview()),
    *TIER_ENDPOINTS,
    Endpoint(f"{PREFIX}/settings", SettingsPage, lambda source, request: source.settings()),
)
"""The questions that a proxy answers (`FactSource`). docs/day-to-day.md describes them."""
CHILD_ENDPOINTS: Final = (
    Endpoint("/internal/report", ProcessReport, lambda source, request: source.report()),
    Endpoint("/internal/cluster", ClusterFacts, lambda source, request: source.cluster()),
    *TIER_ENDPOINTS,
)
"""The questions that the supervisor asks a process (`OwnFacts`)."""


_ADAPTERS: Final[dict[type[Any], TypeAdapter[Any]]] = {}


def adapter(answer: type[Any]) -> TypeAdapter[Any]:
    """Returns what writes and reads the JSON of a type. It takes milliseconds to make, so it is kept."""
    if answer not in _ADAPTERS:
        _ADAPTERS[answer] = TypeAdapter(answer)
    return _ADAPTERS[answer]


Route = tuple[str, Callable[[web.Request], Awaitable[web.Response]]]


def routes_of(endpoints: Iterable[Endpoint], source: TierFacts) -> list[Route]:
    """Returns the paths and the handlers. `source` answers all of them."""

    def handler(endpoint: Endpoint) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            try:
                found = await endpoint.ask(source, request)
            except FactsUnavailableError as error:
                return web.json_response({"error": str(error)}, status=503)
            except web.HTTPBadRequest as error:
                return web.json_response({"error": (error.text or "").strip()}, status=400)
            if found is None:
                return web.json_response({"error": "the remote tier does not know it"}, status=404)
            return web.Response(body=adapter(endpoint.answer).dump_json(found), content_type="application/json")

        return answer

    return [(each.path, handler(each)) for each in endpoints]


def query_of(query: TopicQuery) -> dict[str, str]:
    """Returns a query as the parameters that ask for it."""
    values = asdict(query)
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
