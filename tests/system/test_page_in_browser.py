"""The page in a real browser: content, filter, keyboard, colours, widths, a dead store and a dead broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from proxy.admin.facts import ErrorLine, EventLine, Overview, ReaderLine
from proxy.admin.source import FactsUnavailableError
from proxy.process.admin.http import admin_pages
from tests.support.proxy.page_facts import MIB, NOW_MS, NoPages, ScriptedFacts, many_topics
from tests.support.servers.chromium import BrowserPage, browser_page

WIDTHS = (360, 414, 600, 768, 860, 1024, 1280, 1920)
PATHS = (
    "/",
    "/topics",
    "/topics/orders-0000",
    "/topics/orders-0000/0",
    "/readers",
    "/settings",
    "/errors",
    "/runbook/gap",
)
ROWS = "document.querySelectorAll('.rows tbody tr').length"
NAMES = "[...document.querySelectorAll('.topics td.name a')].map((each) => each.textContent)"
OVERFLOWING = """
(() => {
  const root = document.documentElement;
  if (root.scrollWidth <= root.clientWidth) return [];
  return [...document.querySelectorAll('main *')]
    .filter((each) => each.getBoundingClientRect().right > root.clientWidth + 1)
    .map((each) => each.tagName + '.' + each.getAttribute('class')).slice(0, 5);
})()
"""
TOO_FAINT = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const each of document.querySelectorAll('main *, header *, footer *')) {
    const hasText = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!hasText || each.closest('svg') || !each.getClientRects().length) continue;
    const [a, b] = [light(parse(getComputedStyle(each).color)), light(ground(each))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(each.className + ': ' + each.textContent.trim().slice(0, 30));
  }
  return [...new Set(found)];
})()
"""


def facts(topics: int = 1000, *, in_trouble: bool = False) -> ScriptedFacts:
    found = ScriptedFacts(many_topics(topics), gone_broker=in_trouble, dead_store=in_trouble)
    found.readers_seen = (
        ReaderLine("spark-backfill", "orders-0000", 84_213 * MIB, 61e6, 12_000, 0, 11_400, NOW_MS - 4_000),
        ReaderLine("<script>alert(1)</script>", "audit-0003", 912 * MIB, 1.2e6, 411, 37, 120, NOW_MS - 4_000),
    )
    found.incidents = (
        ErrorLine(NOW_MS, "throttled", "the client is above max.connections", "worker-1", "10.2.3.4:51234"),
        ErrorLine(NOW_MS, "undecodable", "a negative length", "worker-2", "[::1]:5", 2, "x", "client"),
    )
    if in_trouble:
        found.events = (
            EventLine(
                NOW_MS - 9_000, "copy-stalled", "copying makes no progress",
                "partition orders-0000-0, error http://store.example.org: connection refused, since 2026-09-21T14:12",
                "remote-log",
            ),
            EventLine(
                NOW_MS - 90_000, "unfit",
                "this process cannot work as an owner, and keeps partitions only while no other process can",
                "probe store, error connection refused, since 2026-09-21T14:11", "remote-log",
            ),
        )  # fmt: skip
        line, partitions = found.topic_lines["orders-0000"]
        partitions[0] = replace(
            partitions[0], alarms=("copy-stalled",), gaps=1, cut_segments=2, cut_bytes=128 * MIB,
            trouble="no broker answers within 2500 ms: 10.0.0.3:9092: connection refused",
        )  # fmt: skip
        found.topic_lines["orders-0000"] = (
            replace(line, alarms=("copy-stalled",), gaps=1, unanswered=1),
            partitions,
        )
    return found


@asynccontextmanager
async def opened(source: ScriptedFacts) -> AsyncIterator[tuple[BrowserPage, str]]:
    async with (
        admin_pages(("127.0.0.1", 0), NoPages(), source, version="0.1.0") as (host, port),
        browser_page() as page,
    ):
        yield page, f"http://{host}:{port}"
        assert page.problems == []


async def test_an_operator_finds_a_topic_with_the_keyboard() -> None:
    async with opened(facts()) as (page, url):
        await page.show(1280)
        await page.open(f"{url}/topics")
        assert await page.run(ROWS) == 100
        assert "1 of 10" in await page.run("document.querySelector('.pages').textContent")
        await page.key("/")
        assert await page.run("document.activeElement.name") == "search"
        await page.write("orders-0")
        await page.until(f"{NAMES}.length > 0 && {NAMES}.every((name) => name.startsWith('orders-0'))")
        assert "143 of 1" in await page.run("document.querySelector('.count').textContent")
        assert await page.run("location.search") == "?search=orders-0&sort=name"
        await page.key("Escape")
        await page.key("j")
        await page.key("j")
        await page.key("k")
        assert await page.run("document.querySelector('tr.at a').textContent") == "orders-0000"
        await page.key("Enter")
        await page.until("location.pathname === '/topics/orders-0000' && document.readyState === 'complete'")
        await page.key("t")
        await page.until("location.pathname === '/topics' && document.readyState === 'complete'")


async def test_the_list_is_sorted_by_its_headings() -> None:
    async with opened(facts()) as (page, url):
        await page.open(f"{url}/topics")
        await page.run(
            "[...document.querySelectorAll('th a')].find((each) => each.textContent === 'Log by tier').click()"
        )
        await page.until("location.search.includes('sort=size') && document.readyState === 'complete'")
        assert await page.run("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"


async def test_settings_are_filtered_in_place() -> None:
    async with opened(facts(1)) as (page, url):
        await page.open(f"{url}/settings")
        await page.key("/")
        await page.write("password")
        shown = "[...document.querySelectorAll('.rows tbody tr')].filter((each) => !each.hidden).length"
        await page.until(f"{shown} === 1")
        assert "of-the-broker" not in await page.run("document.body.textContent")


async def test_no_text_of_a_user_runs() -> None:
    async with opened(facts(1)) as (page, url):
        await page.open(f"{url}/readers")
        assert "<script>alert(1)</script>" in await page.run("document.querySelector('.rows').textContent")
        assert await page.run("document.querySelectorAll('script').length") == 1


@pytest.mark.parametrize("in_trouble", [False, True], ids=["healthy", "dead store and broker"])
async def test_every_page_fits_every_width_in_both_colours(in_trouble: bool) -> None:
    async with opened(facts(120, in_trouble=in_trouble)) as (page, url):
        for path in PATHS:
            await page.open(url + path)
            await page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            for scheme in ("light", "dark"):
                for width in WIDTHS:
                    await page.show(width, scheme=scheme)
                    assert await page.run(OVERFLOWING) == [], f"{path} at {width} px"
                assert await page.run(TOO_FAINT) == [], f"{path} in {scheme}"


async def test_the_colours_can_be_switched_and_stay() -> None:
    async with opened(facts(1)) as (page, url):
        await page.show(1280, scheme="light")
        await page.open(url)
        before = await page.run("getComputedStyle(document.body).backgroundColor")
        await page.run("document.querySelector('.theme').click()")
        after = await page.run("getComputedStyle(document.body).backgroundColor")
        assert before != after
        await page.open(f"{url}/topics")
        assert await page.run("getComputedStyle(document.body).backgroundColor") == after


class Silent(ScriptedFacts):
    """Facts of a process that knows nothing now."""

    trouble = ""

    async def overview(self) -> Overview:
        if self.trouble:
            raise FactsUnavailableError(self.trouble)
        return await super().overview()


async def test_a_page_that_gets_no_answer_says_how_old_it_is() -> None:
    source = Silent(many_topics(1))
    refresh = "load(location.href, ['main', 'footer'])"
    stale = "document.querySelector('.stale')?.textContent"
    async with (
        admin_pages(("127.0.0.1", 0), NoPages(), source, version="0.1.0") as (host, port),
        browser_page() as page,
    ):
        await page.open(f"http://{host}:{port}/")
        source.trouble = "the process does not answer"
        await page.run(refresh)
        shown = "The page shows what was known at 2026-09-21 14:13:20 UTC."
        assert await page.run(stale) == f"Not available now: the process does not answer. {shown}"
        source.trouble = ""
        await page.run(refresh)
        assert await page.run(stale) is None
        await page.run("fetch = () => Promise.reject(new TypeError('nobody listens'))")
        await page.run(refresh)
        await page.run(refresh)
        assert await page.run(stale) == f"The proxy does not answer. {shown}"
        assert await page.run("document.querySelectorAll('.stale').length") == 1


async def test_a_dead_store_and_a_dead_broker_can_be_seen() -> None:
    source = facts(12)
    async with opened(source) as (page, url):
        await page.show(1280, 1400)
        await page.open(url)
        assert "No alarm is raised" in await page.run("document.body.textContent")
        source.dead_store = source.gone_broker = True
        await page.run("load(location.href, ['main'])")
        await page.until("document.querySelectorAll('.outage').length === 1")
        said = await page.run("document.body.innerText")
        assert "Store s3 at https://s3.example.org: connection refused since" in said
        assert "2 alarms follow from it" in said
        assert "DOWN" in said
        assert "GONE" in said
