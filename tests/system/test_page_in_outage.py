"""The page of a real proxy in a browser while the S3 server is dead, and then the only broker, and afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp
import pytest

from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.servers.chromium import BrowserPage, browser_page
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tests.support.servers.versitygw import VersityGateway

pytestmark = pytest.mark.integration
TOPIC = "orders"
BUCKET = "page"
RECORDS = 2_000
ANSWER_S = 20.0
"""The deadline of the page: the supervisor gives a child 15 s, and the script of the page waits 20 s."""
WITHIN_S = 240.0
PATHS = ("/", "/topics", f"/topics/{TOPIC}", f"/topics/{TOPIC}/0", "/readers", "/settings", "/errors", "/runbook/unfit")


class Operator:
    """Somebody with a browser. Every page must answer within its deadline, and none with an internal error."""

    def __init__(self, proxy: TidegateProcess, browser: BrowserPage, session: aiohttp.ClientSession) -> None:
        self._url = f"http://{proxy.admin[0]}:{proxy.admin[1]}"
        self._browser = browser
        self._session = session

    async def looks_at_every_page(self) -> Mapping[str, int]:
        """Returns the status of each page, and of each of the API."""
        found = {}
        for path in (*PATHS, "/api/v1/overview", f"/api/v1/topics/{TOPIC}/0", "/metrics"):
            async with self._session.get(self._url + path) as answer:
                await answer.read()
                found[path] = answer.status
        return found

    async def reads(self, path: str) -> str:
        await self._browser.open(self._url + path)
        return str(await self._browser.run("document.querySelector('main').innerText"))

    async def until(self, path: str, is_seen: Callable[[str], bool]) -> str:
        """Opens a page again until it says what is expected, and returns what it says."""
        deadline = time.monotonic() + WITHIN_S
        while not is_seen(said := await self.reads(path)):
            assert time.monotonic() < deadline, said
            await asyncio.sleep(0.5)
        return said

    async def alarms(self) -> set[str]:
        """Returns the alarms that are raised, also those that follow from an outage."""
        async with self._session.get(f"{self._url}/api/v1/overview") as answer:
            overview = await answer.json()
        roots = overview["outages"]
        following = [each for outage in roots for each in outage["consequences"]]
        return {each["name"] for each in [*overview["alarms"], *following]} | {each["alarm"] for each in roots}


def says(*parts: str) -> Callable[[str], bool]:
    return lambda said: all(part.lower() in said.lower() for part in parts)


async def test_the_page_answers_while_the_store_and_the_broker_are_dead(tmp_path: Path) -> None:
    settings: dict[str, str | int] = {"workers": 2, "remote.log.visible.after.ms": 1000}
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as kafka, VersityGateway() as store:
        await store.create_bucket(BUCKET)
        create_topic(kafka.bootstrap_servers, TOPIC)
        storage = {"implementation": "s3", **store.settings(BUCKET)}
        proxy = tidegate_over(
            kafka, tmp_path, tiered=[TOPIC], segment_bytes=400_000, storage=storage, settings=settings
        )
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        with proxy:
            await asyncio.to_thread(produce, proxy.bootstrap_servers, TOPIC, random_values(RECORDS))
            await asyncio.to_thread(until_trimmed, kafka, TOPIC, RECORDS // 2)
            async with aiohttp.ClientSession(timeout=timeout) as session, browser_page() as browser:
                operator = Operator(proxy, browser, session)
                await _outages(operator, kafka, store, proxy)


async def _outages(operator: Operator, kafka: KafkaCluster, store: VersityGateway, proxy: TidegateProcess) -> None:
    everything_works = ("No alarm is raised.", "SERVING", "UP")
    await operator.until("/", says(*everything_works))
    assert set((await operator.looks_at_every_page()).values()) == {200}

    store.kill()
    await asyncio.to_thread(produce, proxy.bootstrap_servers, TOPIC, random_values(RECORDS))
    root_cause = ("connection refused since", "Runbook: store-failing", "from it, and end")
    await operator.until("/", says(*root_cause, "DOWN"))
    await operator.until(f"/topics/{TOPIC}/0", says(" failures: "))
    async with asyncio.timeout(WITHIN_S):
        while "unfit" not in await operator.alarms():  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.5)
    assert set((await operator.looks_at_every_page()).values()) == {200}

    await asyncio.to_thread(kafka.kill_broker, 1)
    await operator.until("/", says("clients reach no broker", "Broker 1 at", "Store s3 at", *root_cause))
    await operator.until(f"/topics/{TOPIC}", says("the cluster's metadata was not read in time"))
    assert set((await operator.looks_at_every_page()).values()) == {200}

    await asyncio.to_thread(store.start)
    await asyncio.to_thread(kafka.start_broker, 1)
    said = await operator.until("/", says(*everything_works))
    assert "clients reach no broker" not in said
    assert "of the log" in said, "the events of the outage are still listed"
    assert await operator.alarms() == set()
    await asyncio.to_thread(until_trimmed, kafka, TOPIC, 3 * RECORDS // 2)
