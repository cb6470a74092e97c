"""`tidegate top`: a live view of one proxy, as its overview and its list of topics have it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from typing import Annotated, Final

import typer

from proxy.admin import words
from proxy.admin.facts import Overview, TopicsPage
from proxy.commands.admin_client import AdminClient, admin_client
from proxy.commands.tier.tools import run_command
from proxy.config import TidegateConfig, load_config
from tiers.commands.console import ConfigFile, LiveTable, show_live

_TOPICS: Final = 10


def top(
    config: ConfigFile,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks.")
    ] = 2.0,
) -> None:
    """Shows what a running proxy does, until Ctrl-C.

    Asks the admin port that the file names. Rates and latencies are those of the last 15 seconds. Without a terminal,
    prints one snapshot."""
    settings = load_config(config)
    try:
        run_command(lambda: watch(settings, interval_s))
    except KeyboardInterrupt:
        return


async def watch(config: TidegateConfig, interval_s: float) -> None:
    """Raises `RemoteTierError` when the process does not answer, or ends."""
    async with admin_client(config.admin) as admin:
        await show_live(screens(admin, interval_s))


async def screens(admin: AdminClient, interval_s: float) -> AsyncIterator[Sequence[LiveTable]]:
    while True:
        overview = await admin.overview()
        yield tables(overview, await admin.largest_backlogs() if overview.is_tiered else None, admin.url)
        await asyncio.sleep(interval_s)


def tables(overview: Overview, topics: TopicsPage | None = None, url: str = "") -> list[LiveTable]:
    """Returns the screen. Without `topics`, it has no list of topics."""
    outages = [(line,) for outage in overview.outages for line in words.outage_lines(outage, overview.as_of_ms)]
    fetches = ("tier", "Fetch p50", "Fetch p99", "read by clients")
    processes = ("process", "state", "connections", "memory", "restarts", "why")
    backlogs = ("topic", "not copied", "behind", "remote", "state")
    return [
        *([LiveTable("Root cause", ("what",), outages)] if outages else []),
        LiveTable(f"tidegate at {url}", fetches, list(_fetches(overview)), fetches[1:]),
        LiveTable("Remote tier", ("what", "value"), list(_tier(overview)), ("value",)),
        LiveTable("Processes", processes, list(_processes(overview)), processes[2:5]),
        *([] if topics is None else [LiveTable("Largest backlogs", backlogs, list(_topics(topics)), backlogs[1:4])]),
        LiveTable(
            "Other alarms, and pauses" if outages else "Alarms and pauses", ("about", "alarm"), _alarms(overview)
        ),
    ]


def _latest(overview: Overview, name: str) -> str | None:
    """Returns the last value of a series of the history. None: it has no value now."""
    for series in overview.history.series:
        if series.name == name and series.values and series.values[-1] is not None:
            return words.in_unit(series, series.values[-1])
    return None


def _fetches(overview: Overview) -> Iterator[tuple[str | None, ...]]:
    for tier, name in (("local, with long polls", "local"), ("remote", "remote")):
        yield tier, *(_latest(overview, f"{name}_{what}") for what in ("p50", "p99", "bytes"))


def _tier(overview: Overview) -> Iterator[tuple[str, str | None]]:
    yield "copied to the store", _latest(overview, "copied_bytes")
    # Only owners know the backlog. While no broker answers, no process is an owner.
    yield "not copied", _latest(overview, "backlog")
    yield "chunks found in caches", _latest(overview, "cache_hits")
    yield "clients that wait for the remote tier", str(overview.waiting_clients)


def _processes(overview: Overview) -> Iterator[tuple[object, ...]]:
    for each in overview.processes:
        memory = None if each.rss_bytes is None else words.size(each.rss_bytes)
        yield each.name, each.state, each.connections, memory, each.restarts, "; ".join(each.reasons)


def _topics(found: TopicsPage) -> Iterator[tuple[str, ...]]:
    for each in islice(found.topics, _TOPICS):
        remote = words.size(each.bytes.remote_only + each.bytes.both)
        yield each.topic, words.size(each.backlog_bytes), words.duration(each.backlog_ms), remote, each.state


def _alarms(overview: Overview) -> list[tuple[str, str]]:
    alarms = [(each.about, each.name) for each in overview.alarms]
    paused = () if overview.cluster is None else overview.cluster.paused
    return [*alarms, *((each.topic, f"paused: {each.reason}") for each in paused)]
