"""The page as HTML: what it says, and that no text of a user leaves its place."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

import aiohttp
import pytest

from proxy.admin.facts import (
    ErrorLine,
    EventLine,
    Outage,
    Overview,
    OwnerFacts,
    PausedTopic,
    ProcessState,
    RaisedAlarm,
    ReaderLine,
    SettingLine,
    TopicQuery,
    TopicSetting,
    TopicsPage,
    WaitingRead,
)
from proxy.admin.html import Renderer, retention, runs
from proxy.admin.lines import topic_line
from proxy.admin.pages import HEADERS, STATIC, static_file
from proxy.admin.runbook import runbook_page
from proxy.admin.source import FactSource, FactsUnavailableError
from proxy.admin.words import in_units
from proxy.process.admin.http import admin_pages
from tests.support.proxy.page_facts import NOW_MS, NoPages, ScriptedFacts, history, many_topics, partition_line
from tests.support.repository import ROOT
from tiers.errors import Peer

HOSTILE = "<script>alert('x')</script>\"'&"
RENDERER = Renderer("1.2.3")


@asynccontextmanager
async def served(facts: FactSource) -> AsyncIterator[str]:
    async with admin_pages(("127.0.0.1", 0), NoPages(), facts, version="1.2.3") as (host, port):
        yield f"http://{host}:{port}"


async def get(url: str) -> tuple[int, str, Mapping[str, str]]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text(), answer.headers


def texts(html: str) -> str:
    """Returns what a reader sees, on one line."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


async def test_the_list_shows_both_tiers_backlog_and_retention() -> None:
    facts = ScriptedFacts(many_topics(1))
    async with served(facts) as url:
        status, html, _ = await get(f"{url}/topics")
    assert status == 200
    said = texts(html)
    assert "1 topic, 1 partition" in said
    assert "remote only 64.0 MiB, both tiers 128 MiB, local only" in said
    assert "18 h 25 min ago" in said
    assert "for 12 min 34 s" in said
    assert "Oldest segment" in said
    assert 'title="its newest record: ' in html
    assert "local 6 h file total 90 d topic" in said


async def test_a_topic_leads_to_its_partitions_and_these_to_their_segments() -> None:
    async with served(ScriptedFacts()) as url:
        _, topics, _ = await get(f"{url}/topics")
        (link,) = set(re.findall(r'href="(/topics/payments-0001)"', topics))
        _, topic, _ = await get(url + link)
        assert f'href="{link}/1"' in topic
        _, partition, _ = await get(f"{url}{link}/1")
    assert "leader 2, leader epoch 4" in texts(partition)
    assert "Oldest segment" in texts(topic)
    assert "Oldest segment" in texts(partition)
    for bound in ("remote first", "local first", "remote last", "LSO", "HW"):
        assert re.search(rf'<text class="bound"[^>]*>[^<]*\b{bound}\b', partition), bound
    for letters in ("Rx", "Lx", "Ry", "Ly", "Lz"):
        assert re.search(rf"<title>{letters}: \d+</title>", partition), letters
    assert partition.count('<span class="state remote">') == 13


@pytest.mark.parametrize("path", ["/topics/none", "/topics/orders-0000/99", "/runbook/none", "/nosuch", "/a/b/c/d"])
async def test_what_the_tier_does_not_know_is_not_found(path: str) -> None:
    async with served(ScriptedFacts()) as url:
        status, html, _ = await get(url + path)
    assert status == 404
    assert "Not found" in texts(html)
    assert 'aria-label="Pages"' in html


async def test_paused_topics_are_on_the_overview_and_are_no_alarm() -> None:
    source = ScriptedFacts()
    overview = await source.overview()
    assert overview.cluster is not None
    paused = PausedTopic(
        "orders", "an operator paused trimming: `tidegate tier resume orders --trimming --yes` ends it"
    )
    cluster = replace(overview.cluster, paused_topics=3, paused=(paused,))
    html = RENDERER.overview(replace(overview, cluster=cluster))
    assert "No alarm is raised." in texts(html)
    assert re.search(r'<p class="banner warn"><strong><a href="/topics/orders">orders</a> is paused:', html)
    assert "<code>tidegate tier resume orders --trimming --yes</code>" in html
    assert "2 more topics are paused." in texts(html)
    assert "each value covers 15 s" in texts(html)


@pytest.mark.parametrize(
    "path",
    ["/topics?page=x", "/topics?sort=colour", "/topics?state=lost", "/topics/orders-0000/-1", "/topics/a/0?from=x"],
)
async def test_a_wrong_address_is_refused(path: str) -> None:
    async with served(ScriptedFacts()) as url:
        assert (await get(url + path))[0] == 400


async def test_facts_that_are_not_known_are_no_error_of_the_page() -> None:
    class Closed(ScriptedFacts):
        async def topics(self, query: TopicQuery) -> TopicsPage:
            raise FactsUnavailableError("the remote tier is not open yet")

    async with served(Closed()) as url:
        status, html, _ = await get(f"{url}/topics")
    assert status == 503
    assert "Not available now: the remote tier is not open yet." in texts(html)


async def test_texts_of_users_stay_texts() -> None:
    hostile = partition_line(HOSTILE, 0, 5)
    lines = [replace(hostile, trouble=HOSTILE, alarms=(HOSTILE,))]
    line = replace(
        topic_line(HOSTILE, HOSTILE, "tiered", lines, HOSTILE),
        settings=(TopicSetting(HOSTILE, HOSTILE, "topic"), TopicSetting("retention.ms", HOSTILE, "topic")),
    )
    facts = ScriptedFacts({HOSTILE: (line, lines)})
    facts.readers_seen = (ReaderLine(HOSTILE, HOSTILE, 1, 1.0, 1, 1, 0, NOW_MS),)
    facts.incidents = (ErrorLine(NOW_MS, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1, HOSTILE, "client", HOSTILE, 1, 2),)
    overview = await facts.overview()
    topic, partition = await facts.topic(HOSTILE, 1), await facts.partition(HOSTILE, 0, 0)
    assert topic is not None
    assert partition is not None
    pages = [
        RENDERER.topics(await facts.topics(TopicQuery(search=HOSTILE))),
        RENDERER.topics(await facts.topics(TopicQuery())),
        RENDERER.topic(topic),
        RENDERER.partition(HOSTILE, partition),
        RENDERER.readers(await facts.readers()),
        RENDERER.errors(await facts.errors()),
        RENDERER.overview(_hostile(overview)),
    ]
    for html in pages:
        assert "<script>alert" not in html
        assert "&lt;script&gt;alert" in html
        for value in re.findall(r'href="([^"]*)"', html):
            assert value.startswith(("/", "#"))


def _hostile(overview: Overview) -> Overview:
    process = replace(overview.processes[0], name=HOSTILE, reasons=(HOSTILE,), state=ProcessState.FAILED)
    store = replace(overview.stores[0], store=HOSTILE)
    following = (RaisedAlarm(HOSTILE, HOSTILE),)
    outage = Outage(Peer.STORE, "store-failing", HOSTILE, HOSTILE, NOW_MS, consequences=following)
    return replace(overview, processes=(process,), stores=(store,), outages=(outage,))


async def test_a_page_loads_nothing_from_elsewhere_and_runs_no_other_script() -> None:
    async with served(ScriptedFacts()) as url:
        for path in ("/", "/topics", "/readers", "/settings", "/errors", "/runbook/gap"):
            _, html, headers = await get(url + path)
            assert headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert not re.findall(r'(?:src|href)="(?:https?:)?//', html)
            assert not re.findall(r"\sstyle=|\son[a-z]+=|<style|<script(?! src=\"/static/)", html)
    for name in STATIC:
        assert "http" not in static_file(name).decode().replace("http://www.w3.org/2000/svg", "")


async def test_static_files_are_those_of_the_page_alone() -> None:
    async with served(ScriptedFacts()) as url:
        for name, kind in STATIC.items():
            status, _, headers = await get(f"{url}/static/{name}")
            assert (status, headers["Content-Type"].partition(";")[0]) == (200, kind)
        assert (await get(f"{url}/static/..%2Fhtml.py"))[0] == 404


async def test_a_dead_store_and_a_dead_broker_are_named_with_what_to_do() -> None:
    facts = ScriptedFacts(dead_store=True, gone_broker=True)
    async with served(facts) as url:
        _, html, _ = await get(f"{url}/")
        said = texts(html)
        assert "s3 DOWN no answer" in said
        assert "not in the cluster since" in said
        assert "store s3 at https://s3.example.org: connection refused since " in said
        assert "Correct the store, the network or the credentials." in said
        assert said.count("connection refused") == 1
        assert "2 clients wait since " in said
        assert "the copying of 3 partitions waits" in said
        assert "2 alarms follow from it, and end with it unfit remote-log copy-stalled orders-0000" in said
        assert "No alarm is raised." not in said
        assert 'href="/runbook/copy-stalled"' in html
        _, runbook, _ = await get(f"{url}/runbook/copy-stalled")
    page = runbook_page("copy-stalled")
    assert page is not None
    assert f"copy-stalled {page.title} Alerts: " in texts(runbook)
    assert page.what_to_do in runbook
    assert '<a href="/runbook/store-failing">store-failing</a>' in page.what_to_do


async def test_a_store_that_answers_again_is_up_and_its_errors_are_a_note() -> None:
    overview = await ScriptedFacts().overview()
    html = RENDERER.overview(replace(overview, stores=(replace(overview.stores[0], recent_errors=4),)))
    assert "s3 UP 4 failed calls in 5 min" in texts(html)


async def test_an_owner_whose_id_is_not_known_is_this_proxy() -> None:
    overview = await ScriptedFacts().overview()
    assert overview.cluster is not None
    alone = replace(overview.cluster, owners=(OwnerFacts("", "", (0, 1), 4, is_this=True),))
    assert texts(RENDERER.overview(replace(overview, cluster=alone))).count("this proxy") == 1


async def test_clients_that_ask_in_vain_are_named() -> None:
    facts = ScriptedFacts()
    facts.waiting = (WaitingRead("billing", "orders", 2, 4_711, NOW_MS - 65_000, "connection refused"),)
    async with served(facts) as url:
        _, html, _ = await get(f"{url}/readers")
    assert "billing orders 2 4 711" in texts(html)
    assert "for 1 min 5 s connection refused" in texts(html)
    waiting = replace(await facts.overview(), waiting_clients=1)
    assert "1 client waits for records of the remote tier." in texts(RENDERER.overview(waiting))


async def test_alarms_that_are_not_known_are_not_taken_for_none() -> None:
    known = await ScriptedFacts().overview()
    unknown = texts(RENDERER.overview(replace(known, cluster=None)))
    assert "The alarms of the remote tier are not known." in unknown
    assert "No alarm is raised." not in unknown
    for facts in (known, replace(known, cluster=None, is_tiered=False)):
        assert "No alarm is raised." in texts(RENDERER.overview(facts))
    assert known.cluster is not None
    alone = texts(RENDERER.overview(replace(known, cluster=replace(known.cluster, trouble="connection refused"))))
    assert "The owner reaches no broker." in alone
    assert "No alarm is raised." not in alone


async def test_the_last_events_are_listed_with_their_pages() -> None:
    facts = ScriptedFacts()
    async with served(facts) as url:
        _, quiet, _ = await get(f"{url}/")
        facts.events = (EventLine(NOW_MS, "gap", "the broker removed <records>", "partition orders-0", "remote-log"),)
        _, html, _ = await get(f"{url}/")
    assert "of the log" not in texts(quiet)
    assert 'href="/runbook/gap"' in html
    assert "the broker removed &lt;records&gt;" in html
    assert "partition orders-0" in texts(html)


async def test_a_thousand_topics_are_shown_page_by_page() -> None:
    async with served(ScriptedFacts(many_topics(1000))) as url:
        _, first, _ = await get(f"{url}/topics")
        _, last, _ = await get(f"{url}/topics?page=10&sort=size&descending=true")
    assert first.count("<tr>") == 101
    assert "page 1 of 10" in texts(first)
    assert 'href="/topics?sort=size&amp;descending=true&amp;page=9"' in last


async def test_pages_without_a_line_say_why() -> None:
    for source, path, said in (
        (ScriptedFacts({}), "/topics", "No topic is tiered yet."),
        (ScriptedFacts(), "/topics?search=nothing", "No topic matches."),
    ):
        async with served(source) as url:
            assert said in texts((await get(url + path))[1])


def test_the_retention_names_the_source_and_what_limits_the_broker() -> None:
    settings = [
        TopicSetting("local.retention.ms", "-2", "default"),
        TopicSetting("remote.log.retention.minutes", "129600", "topic"),
        TopicSetting("retention.ms", "86400000", "broker"),
        TopicSetting("retention.bytes", "-1", "broker"),
    ]
    assert [(each.text, each.source) for each in retention(settings)] == [
        ("total 90 d", "topic"),
        ("broker 1 d", "broker"),
    ]


async def test_a_setting_has_its_description_and_its_unit() -> None:
    async with served(ScriptedFacts()) as url:
        _, html, _ = await get(f"{url}/settings")
    assert "workers The number of processes. 2" in texts(html)
    assert "<code>max.<wbr>connections</code>" in html
    lines = [
        SettingLine("", key, value, "file", "", "")
        for key, value in (
            ("a.ms", "90000"),
            ("a.bytes", "1048576"),
            ("a.bytes.per.second", "1048576"),
            ("a.bytes", ""),
            ("a", "7"),
        )
    ]
    assert [in_units(each) for each in lines] == ["1 min 30 s", "1.00 MiB", "1.00 MiB/s", "", ""]


def test_a_young_process_shows_its_own_time() -> None:
    overview = asyncio.run(ScriptedFacts().overview())
    assert "The last hour each" in texts(RENDERER.overview(overview))
    young = replace(overview, history=history(16))
    assert "The last 4 min each" in texts(RENDERER.overview(young))


def test_numbers_are_written_as_runs() -> None:
    assert runs([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert runs([]) == "\N{EN DASH}"


def test_the_package_has_every_file_of_the_page() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["proxy"]
    folder = ROOT / "proxy" / "admin"
    files = [each for each in folder.rglob("*") if each.is_file() and each.suffix not in (".py", ".pyc")]
    files += (folder / "runbook").iterdir()
    assert len(files) > 50
    for each in files:
        name = each.relative_to(ROOT / "proxy").as_posix()
        assert any(fnmatchcase(name, pattern) for pattern in patterns), name
