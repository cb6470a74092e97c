"""How the supervisor reads its children: with a deadline, and with the reason why there is no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from aiohttp import web

from proxy.admin.api import adapter
from proxy.admin.counts import ProcessReport
from proxy.admin.facts import THIS_PROCESS, EventLine, RaisedAlarm
from proxy.process.admin.child_pages import FACTS_TIMEOUT_S, ChildPages
from proxy.process.admin.facts_of_all import CLUSTER_PATH, REMOTE_LOG, REPORT_PATH, FactsOfAll, OwnAlarms
from proxy.process.admin.process_alarms import ProcessAlarm, ProcessAlarms
from proxy.process.admin.recent_events import RecentEvents
from proxy.process.processes import WholePages
from tests.support.proxy.parsed_config import parse_config

CONFIG = """
[upstream]
bootstrap.servers = "a:1"
[storage]
implementation = "local"
path = "/tier"
[[topics]]
name = "orders"
"""

UNTIERED = '[upstream]\nbootstrap.servers = "a:1"\n'


def own() -> OwnAlarms:
    """The alarms of the supervisor's process."""
    return OwnAlarms(ProcessAlarms(), RecentEvents())


def facts_of(children: Sequence[Any], ask: Any, config: str = UNTIERED, alarms: OwnAlarms | None = None) -> FactsOfAll:
    supervisor, pages = cast(Any, SimpleNamespace(children=children)), cast(Any, SimpleNamespace(ask=ask))
    return FactsOfAll(parse_config(config), supervisor, pages, (), alarms or own(), lambda: 1)


def child(name: str, pid: int | None) -> Any:
    process = None if pid is None else SimpleNamespace(pid=pid)
    return cast(Any, SimpleNamespace(name=name, process=process, restarts=0))


async def test_a_child_that_does_not_answer_is_named() -> None:
    hangs = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await hangs.wait()
        return web.Response(text="late")

    application = web.Application()
    application.add_routes([web.get("/page", hang)])
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            pages = ChildPages({"a": port, "b": 1}, session)
            assert await pages.ask(child("a", 7), "/page", timeout_s=0.01) == (503, "the process does not answer")
            assert await pages.ask(child("a", None), "/page") == (503, "the process is not running")
            assert await pages.ask(child("b", 7), "/page") == (503, "the process does not answer")
            hangs.set()
            assert await pages.ask(child("a", 7), "/page") == (200, "late")
            without_admin_port = ChildPages({}, session)
            assert await without_admin_port.ask(child("a", 7), "/page") == (200, "")
            assert await without_admin_port.ask(child("a", None), "/page") == (503, "the process is not running")
    finally:
        await runner.cleanup()


async def test_a_dead_remote_log_process_leaves_the_rest_of_the_overview() -> None:
    """The facts get the time that the child needs to notice that no broker answers."""
    asked: list[tuple[str, float]] = []

    async def ask(one: Any, path: str, parameters: object = None, timeout_s: float = 2.0) -> tuple[int, str]:
        asked.append((path, timeout_s))
        return 503, "the process does not answer"

    overview = await facts_of([child("worker-1", 5), child(REMOTE_LOG, None)], ask, CONFIG).overview()
    assert (overview.cluster, overview.alarms, overview.is_tiered) == (None, (), True)
    assert [(each.name, each.state) for each in overview.processes] == [
        ("worker-1", "INITIALIZING"),
        (REMOTE_LOG, "FAILED"),
    ]
    assert (CLUSTER_PATH, FACTS_TIMEOUT_S) in asked


async def test_a_process_that_is_late_keeps_its_alarms() -> None:
    """Another process of the same name has none of them."""
    failing = RaisedAlarm("proxy-rejected", THIS_PROCESS, "the password is wrong")
    is_late = False

    async def ask(one: Any, path: str, parameters: object = None, timeout_s: float = 2.0) -> tuple[int, str]:
        if is_late or path != REPORT_PATH:
            return 503, "the process does not answer"
        return 200, adapter(ProcessReport).dump_json(ProcessReport(one.process.pid, alarms=(failing,))).decode()

    children = [child("worker-1", 5)]
    facts = facts_of(children, ask)
    answered = await facts.overview()
    is_late = True
    assert (await facts.overview()).alarms == answered.alarms != ()
    children[:] = [child("worker-1", 6)]
    assert (await facts.overview()).alarms == ()


async def test_an_alarm_of_several_processes_is_one_alarm() -> None:
    rejected = RaisedAlarm("proxy-rejected", THIS_PROCESS, "the password is wrong")
    events = {"worker-1": 3, "worker-2": 5}

    async def ask(one: Any, path: str, parameters: object = None, timeout_s: float = 2.0) -> tuple[int, str]:
        if path != REPORT_PATH:
            return 503, "the process does not answer"
        event = EventLine(events[one.name], "gap", "the broker removed records before they were copied")
        report = ProcessReport(one.process.pid, alarms=(rejected,), events=(event,))
        return 200, adapter(ProcessReport).dump_json(report).decode()

    children, ours = [child("worker-1", 5), child("worker-2", 6)], own()
    ours.alarms.watch(ProcessAlarm.SETTINGS_NOT_RELOADED, lambda: ["a mistake"])
    overview = await facts_of(children, ask, alarms=ours).overview()
    assert overview.alarms == (
        RaisedAlarm("proxy-rejected", "worker-1, worker-2", "the password is wrong", "worker-1"),
        RaisedAlarm("settings-not-reloaded", "supervisor", "a mistake", "supervisor"),
    )
    assert [(each.process, each.time_ms) for each in overview.events] == [("worker-2", 5), ("worker-1", 3)]
    supervisor, pages = cast(Any, SimpleNamespace(children=children)), cast(Any, SimpleNamespace(ask=ask))
    metrics = (await WholePages(supervisor, pages, ours.alarms).metrics()).decode().splitlines()
    assert 'tidegate_process_alarm{alarm="settings-not-reloaded",process="supervisor"} 1.0' in metrics


async def test_the_page_shows_the_state_that_a_child_tells() -> None:
    told = [
        (503, "the process does not answer", "INITIALIZING", ("the process does not answer",)),
        (503, "state: INITIALIZING\nno broker answers\n", "INITIALIZING", ("no broker answers",)),
        (503, "state: SERVING\nthe remote log metadata: stale\n", "SERVING", ("the remote log metadata: stale",)),
        (200, "ready\n", "SERVING", ()),
        (503, "state: DRAINING\nstopping\n", "DRAINING", ("stopping",)),
        (503, "the process does not answer", "FAILED", ("the process does not answer",)),
    ]
    readyz = iter(told)

    async def ask(one: Any, path: str, parameters: object = None, timeout_s: float = 2.0) -> tuple[int, str]:
        return next(readyz)[:2] if path == "/readyz" else (503, "the process does not answer")

    facts = facts_of([child("worker-1", 5)], ask)
    for _, _, state, reasons in told:
        (seen,) = (await facts.overview()).processes
        assert (seen.state, seen.reasons) == (state, reasons)


async def test_a_proxy_with_workers_tells_its_state_while_it_stops() -> None:
    supervisor = cast(Any, SimpleNamespace(children=[], is_stopping=True))
    pages = WholePages(supervisor, cast(Any, SimpleNamespace(ask=None)), ProcessAlarms())
    assert await pages.not_ready() == ["state: DRAINING", "stopping"]
    assert await pages.not_serving() == ["state: DRAINING", "stopping"]


async def test_a_proxy_serves_while_one_of_its_workers_does() -> None:
    said = {"worker-1": (503, "the process is not running"), "worker-2": (200, "serving\n")}

    async def ask(one: Any, path: str, parameters: object = None, timeout_s: float = 2.0) -> tuple[int, str]:
        return said.get(one.name, (503, "the process does not answer")) if path == "/servez" else (503, "a problem")

    children = [child("worker-1", None), child("worker-2", 5), child("remote-log", 6), child("remote-reader", 7)]
    supervisor = cast(Any, SimpleNamespace(children=children, is_stopping=False))
    pages = WholePages(supervisor, cast(Any, SimpleNamespace(ask=ask)), ProcessAlarms())
    assert await pages.not_serving() == []
    assert "remote-log: a problem" in await pages.not_ready()
    said["worker-2"] = 503, "state: INITIALIZING\nno broker answers\n"
    assert await pages.not_serving() == [
        "worker-1: state: FAILED",
        "worker-1: the process is not running",
        "worker-2: state: INITIALIZING",
        "worker-2: no broker answers",
    ]
