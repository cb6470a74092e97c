"""The API: its document names its routes, and describes its answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from proxy.admin.api import DOCUMENT, ENDPOINTS, RELOAD, api_routes, openapi
from proxy.admin.facts import ErrorLine, ReaderLine
from proxy.process.admin.http import admin_pages
from tests.support.proxy.page_facts import NOW_MS, NoPages, ScriptedFacts


def facts() -> ScriptedFacts:
    found = ScriptedFacts(dead_store=True, gone_broker=True)
    found.readers_seen = (ReaderLine("spark", "orders", 1, 2.5, 3, 0, 1, NOW_MS),)
    found.incidents = (ErrorLine(NOW_MS, "closed", "it sends nothing", dump=("00",)),)
    return found


async def asked(source: ScriptedFacts, path: str) -> tuple[int, Any]:
    async with (
        admin_pages(("127.0.0.1", 0), NoPages(), source, version="1.2.3") as (host, port),
        aiohttp.ClientSession() as session,
        session.get(f"http://{host}:{port}{path}") as answer,
    ):
        assert answer.content_type == "application/json"
        return answer.status, await answer.json()


def check(value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any], where: str) -> None:
    """Holds a JSON value against the part of JSON Schema that the document uses."""
    if "$ref" in schema:
        check(value, schemas[schema["$ref"].rpartition("/")[2]], schemas, where)
    elif "anyOf" in schema:
        named = [schemas[each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in schema["anyOf"]]
        choices = [each for each in named if _has_type(value, each)]
        fitting = [each for each in choices if value in each.get("enum", [each.get("const", value)])]
        assert fitting, f"{where}: {value!r} fits none of {schema['anyOf']}"
        check(value, fitting[0], schemas, where)
    else:
        assert _has_type(value, schema), f"{where}: {value!r} is no {schema.get('type')}"
        if "enum" in schema:
            assert value in schema["enum"], where
        if schema.get("type") == "object":
            assert set(schema.get("required", ())) <= set(value) <= set(schema["properties"]), where
            for name, each in value.items():
                check(each, schema["properties"][name], schemas, f"{where}.{name}")
        if schema.get("type") == "array":
            for number, each in enumerate(value):
                check(each, schema.get("items", {}), schemas, f"{where}[{number}]")


def _has_type(value: Any, schema: Mapping[str, Any]) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "boolean": (bool,),
        "integer": (int,),
        "number": (int, float),
        "null": (type(None),),
    }
    kind = schema.get("type")
    if kind is None:
        return True
    return isinstance(value, kinds[kind]) and (kind == "boolean" or not isinstance(value, bool))


async def test_the_document_names_every_route_and_no_other() -> None:
    status, document = await asked(facts(), DOCUMENT)
    assert status == 200
    assert document == openapi("1.2.3")
    probes = {"/livez", "/servez", "/readyz"}
    assert probes < set(document["paths"])
    assert set(document["paths"]) - {RELOAD, *probes} | {DOCUMENT} == {path for path, _ in api_routes(facts(), "1.2.3")}
    assert document["info"]["version"] == "1.2.3"


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
async def test_an_answer_is_as_the_document_says(endpoint: Any) -> None:
    path = endpoint.path.replace("{topic}", "orders-0000").replace("{partition}", "0")
    status, answer = await asked(facts(), path)
    assert status == 200
    document = openapi("1.2.3")
    schema = document["paths"][endpoint.path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    check(answer, schema, document["components"]["schemas"], endpoint.path)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_a_route_documents_the_parameters_of_its_path(endpoint: Any) -> None:
    named = {each.name for each in endpoint.parameters if each.place == "path"}
    assert named == set(re.findall(r"\{(\w+)\}", endpoint.path))


async def test_a_parameter_that_is_wrong_is_named() -> None:
    for path, said in (
        ("/api/v1/topics?sort=colour", "sort is one of name, size, backlog, age, alarms"),
        ("/api/v1/topics?page=-1", "page is a whole number"),
        ("/api/v1/topics/orders-0000/x", "partition is a whole number"),
        ("/api/v1/topics/orders-0000/0?from=1.5", "from is a whole number"),
    ):
        assert await asked(facts(), path) == (400, {"error": said})


async def test_an_unknown_topic_is_not_found() -> None:
    assert (await asked(facts(), "/api/v1/topics/none"))[0] == 404
    assert (await asked(facts(), "/api/v1/topics/orders-0000/99"))[0] == 404


async def test_an_unknown_path_leads_to_the_document() -> None:
    for path in ("/api", "/api/v1", "/api/v1/", "/api/v1/nosuch"):
        assert await asked(facts(), path) == (404, {"error": f"there is no such page: {DOCUMENT} lists all"})


async def test_a_query_filters_sorts_and_pages() -> None:
    _, answer = await asked(facts(), "/api/v1/topics?search=ORDERS&sort=size&descending=true")
    sizes = [sum(each["bytes"].values()) for each in answer["topics"]]
    assert answer["matching"] == len(sizes) == 2
    assert sizes == sorted(sizes, reverse=True)
