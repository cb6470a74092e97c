"""The API: its routes, their parameters and their answers."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from proxy.admin.api import ENDPOINTS, Endpoint, adapter
from proxy.admin.facts import ErrorLine, ReaderLine
from proxy.process.admin.http import admin_pages
from tests.support.proxy.page_facts import NOW_MS, NoPages, ScriptedFacts
from tests.support.repository import ROOT


def facts() -> ScriptedFacts:
    found = ScriptedFacts(dead_store=True, gone_broker=True)
    found.readers_seen = (ReaderLine("spark", "orders", 1, 2.5, 3, 0, 1, NOW_MS),)
    found.incidents = (ErrorLine(NOW_MS, "closed", "it sends nothing"),)
    return found


async def asked(source: ScriptedFacts, path: str) -> tuple[int, Any]:
    async with (
        admin_pages(("127.0.0.1", 0), NoPages(), source, version="1.2.3") as (host, port),
        aiohttp.ClientSession() as session,
        session.get(f"http://{host}:{port}{path}") as answer,
    ):
        assert answer.content_type == "application/json"
        return answer.status, await answer.json()


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
async def test_an_answer_has_the_type_of_its_route(endpoint: Endpoint) -> None:
    path = endpoint.path.replace("{topic}", "orders-0000").replace("{partition}", "0")
    status, answer = await asked(facts(), path)
    assert status == 200
    types = adapter(endpoint.answer)
    assert types.dump_python(types.validate_python(answer), mode="json") == answer


def test_the_documentation_lists_each_route() -> None:
    page = (ROOT / "docs" / "day-to-day.md").read_text()
    assert [each.path for each in ENDPOINTS if f"| `{each.path}` |" not in page] == []


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


async def test_an_unknown_path_names_the_known_ones() -> None:
    for path in ("/api", "/api/v1", "/api/v1/", "/api/v1/nosuch"):
        known = [each.path for each in ENDPOINTS]
        assert await asked(facts(), path) == (404, {"error": "there is no such page", "pages": known})


async def test_a_query_filters_sorts_and_pages() -> None:
    _, answer = await asked(facts(), "/api/v1/topics?search=ORDERS&sort=size&descending=true")
    sizes = [sum(each["bytes"].values()) for each in answer["topics"]]
    assert answer["matching"] == len(sizes) == 2
    assert sizes == sorted(sizes, reverse=True)
