"""The API under `/api/v1/`: the facts as JSON, and the OpenAPI document that describes it.

The document is made of the same table as the routes and of the same types as the answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final, Literal, get_args

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
from proxy.admin.source import FactSource, FactsUnavailableError, TierFacts

PREFIX: Final = "/api/v1"
DOCUMENT: Final = f"{PREFIX}/openapi.json"
RELOAD: Final = f"{PREFIX}/reload"
SORTS: Final = ("name", "size", "backlog", "age", "alarms")
STATES: Final = get_args(TopicState)
MAX_SEARCH: Final = 249
"""The longest name of a topic in Kafka."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a path or of a query."""

    name: str
    place: str
    kind: str
    meaning: str
    choices: tuple[str, ...] = ()


_TOPIC: Final = Parameter("topic", "path", "string", "The topic's name; a deleted topic is `name@id`.")
_PAGE: Final = Parameter("page", "query", "integer", "The page, from 1 on.")


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    answer: type[Any]
    summary: str
    parameters: tuple[Parameter, ...]
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
    Endpoint(
        f"{PREFIX}/topics",
        TopicsPage,
        "One page of the tiered topics.",
        (
            Parameter("search", "query", "string", "A part of the name."),
            Parameter("state", "query", "string", "The state of the topics.", STATES),
            Parameter("sort", "query", "string", "What the topics are sorted by.", SORTS),
            Parameter("descending", "query", "boolean", "Whether the order is reversed."),
            _PAGE,
        ),
        lambda source, request: source.topics(topic_query(request)),
    ),
    Endpoint(
        f"{PREFIX}/topics/{{topic}}",
        TopicPage,
        "A topic and one page of its partitions.",
        (_TOPIC, _PAGE),
        lambda source, request: source.topic(request.match_info["topic"], number(request, "page", 1)),
    ),
    Endpoint(
        f"{PREFIX}/topics/{{topic}}/{{partition}}",
        PartitionPage,
        "A partition: its bounds, and a window of its segments.",
        (
            _TOPIC,
            Parameter("partition", "path", "integer", "The number of the partition."),
            Parameter("from", "query", "integer", "The offset at which the window of segments begins."),
        ),
        lambda source, request: source.partition(
            request.match_info["topic"], partition_number(request), number(request, "from", 0)
        ),
    ),
    Endpoint(
        f"{PREFIX}/readers",
        ReadersPage,
        "Who reads the remote tier.",
        (),
        lambda source, request: source.readers(),
    ),
    Endpoint(
        f"{PREFIX}/errors",
        ErrorsPage,
        "The last undecodable frames, and the last connections that were closed, refused or throttled.",
        (),
        lambda source, request: source.errors(),
    ),
)
"""The questions that a process and a proxy answer (`TierFacts`)."""
ENDPOINTS: Final = (
    Endpoint(
        f"{PREFIX}/overview",
        Overview,
        "The cluster, the stores, the processes, the raised alarms and the last hour.",
        (),
        lambda source, request: source.overview(),
    ),
    *TIER_ENDPOINTS,
    Endpoint(
        f"{PREFIX}/settings",
        SettingsPage,
        "The effective settings with their sources. Secrets are redacted.",
        (),
        lambda source, request: source.settings(),
    ),
)
"""The questions that a proxy answers (`FactSource`)."""
CHILD_ENDPOINTS: Final = (
    Endpoint("/internal/report", ProcessReport, "", (), lambda source, request: source.report()),
    Endpoint("/internal/cluster", ClusterFacts, "", (), lambda source, request: source.cluster()),
    *TIER_ENDPOINTS,
)
"""The questions that the supervisor asks a process (`OwnFacts`)."""


_AS_WRITTEN: Final[Literal["serialization"]] = "serialization"
_ADAPTERS: Final[dict[type[Any], TypeAdapter[Any]]] = {}


def adapter(answer: type[Any]) -> TypeAdapter[Any]:
    """Returns what writes and reads the JSON of a type. It takes milliseconds to make, so it is kept."""
    if answer not in _ADAPTERS:
        _ADAPTERS[answer] = TypeAdapter(answer)
    return _ADAPTERS[answer]


Route = tuple[str, Callable[[web.Request], Awaitable[web.Response]]]


def api_routes(source: FactSource, version: str) -> list[Route]:
    """Returns the paths and the handlers of the API."""

    async def document(request: web.Request) -> web.Response:
        return web.json_response(openapi(version))

    return [*routes_of(ENDPOINTS, source), (DOCUMENT, document)]


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


@cache
def openapi(version: str) -> Mapping[str, Any]:
    """Returns the OpenAPI document."""
    inputs = [(each.path, _AS_WRITTEN, adapter(each.answer)) for each in ENDPOINTS]
    refs, definitions = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    schemas = dict(definitions.get("$defs", {}))
    schemas["Error"] = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    paths = {each.path: {"get": _operation(each, refs[each.path, _AS_WRITTEN])} for each in ENDPOINTS}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidegate",
            "version": version,
            "description": "The facts of the page. A GET changes nothing.",
        },
        "paths": paths | {RELOAD: {"post": _RELOAD}} | {path: {"get": each} for path, each in _PROBES.items()},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic", "description": "The password is the token."},
            },
        },
        "security": [{}, {"bearer": []}, {"basic": []}],
    }


_RELOADED: Final = {
    "type": "object",
    "properties": {
        "applied": {"type": "array", "items": {"type": "string"}, "description": "The settings that apply now."},
        "need_restart": {"type": "array", "items": {"type": "string"}, "description": "Those that need a restart."},
        "mistake": {"type": "string", "description": "What is wrong in the settings. Then nothing has changed."},
    },
    "required": ["applied", "need_restart", "mistake"],
}
_RELOAD: Final = {
    "summary": "Reads the settings again, and applies those that need no restart. Only the bearer token counts.",
    "operationId": "reload",
    "security": [{"bearer": []}],
    "responses": {
        "200": {"description": "The settings are valid.", "content": {"application/json": {"schema": _RELOADED}}},
        "401": {"description": "The bearer token is missing."},
        "403": {"description": "The settings name no token file."},
        "422": {"description": "The settings are wrong.", "content": {"application/json": {"schema": _RELOADED}}},
    },
}


def _probe(name: str, summary: str, refusal: str) -> Mapping[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "operationId": name,
        "security": [{}],
        "responses": {
            "200": {"description": "It does.", "content": text},
            **({"503": {"description": refusal, "content": text}} if refusal else {}),
        },
    }


_REASONS: Final = "It does not. The first line has the state of the process, and each further line a reason."
_PROBES: Final = {
    "/livez": _probe("livez", "Whether the event loop runs.", ""),
    "/servez": _probe(
        "servez",
        "Whether the proxy can relay requests to the brokers: one of them has a listener, and one has answered within "
        "`metadata.max.age.ms` plus 10 s. For load balancers: the answer stays 200 while only the remote tier has a "
        "problem. One worker that serves is enough.",
        _REASONS,
    ),
    "/readyz": _probe(
        "readyz",
        "Whether the proxy serves, every broker has a listener, the brokers accept the proxy, and the metadata topic "
        "can be used. Other problems are alarms alone. Each process must be ready.",
        _REASONS,
    ),
}


def _operation(endpoint: Endpoint, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {
        "200": {"description": endpoint.summary, "content": {"application/json": {"schema": schema}}},
        "401": {"description": "The token or the client certificate is missing."},
        "503": {"description": "The process that knows does not answer now.", "content": error},
    }
    if endpoint.parameters:
        responses["400"] = {"description": "A parameter is wrong.", "content": error}
    if any(each.place == "path" for each in endpoint.parameters):
        responses["404"] = {"description": "The remote tier does not know it.", "content": error}
    return {
        "summary": endpoint.summary,
        "operationId": endpoint.path.removeprefix(f"{PREFIX}/").replace("/", "_").translate({123: None, 125: None}),
        "parameters": [
            {
                "name": each.name,
                "in": each.place,
                "required": each.place == "path",
                "description": each.meaning,
                "schema": {"type": each.kind} | ({"enum": list(each.choices)} if each.choices else {}),
            }
            for each in endpoint.parameters
        ],
        "responses": responses,
    }


def query_of(query: TopicQuery) -> dict[str, str]:
    """Returns a query as the parameters that ask for it."""
    values = asdict(query)
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
