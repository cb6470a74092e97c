"""`tidegate top`: a live view of one proxy: throughput by tier, latency, the backlog of copies, topics, alarms.

It reads `/metrics`, `/readyz` and the overview of the admin port again and again. A rate is the difference of two
scrapes, so the first screen comes after the first interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Final

import typer

from proxy.admin.facts import Overview
from proxy.admin.words import outage_lines
from proxy.commands.scrape import AdminClient, Scrape, admin_client
from proxy.commands.tier.tools import run_command
from proxy.config import TidegateConfig, load_config
from tiers.commands.console import ConfigFile, LiveTable, show_live
from tiers.texts import size_text

_LATENCY: Final = "tidegate_request_latency_seconds"
_TOPICS: Final = 10


def top(
    config: ConfigFile,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks.")
    ] = 2.0,
) -> None:
    """Shows what a running proxy does, until Ctrl-C.

    Asks the admin port that the file names. Without a terminal, prints one snapshot, after one interval."""
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
    before = await admin.scrape()
    while True:
        await asyncio.sleep(interval_s)
        now = await admin.scrape()
        not_ready, overview = await asyncio.gather(admin.not_ready(), admin.overview())
        yield tables(before, now, overview, admin.url, not_ready)
        before = now


def tables(
    before: Scrape, now: Scrape, overview: Overview, url: str = "", not_ready: Sequence[str] = ()
) -> list[LiveTable]:
    """Returns the screen for the time between two scrapes of one proxy."""
    outages = [(line,) for outage in overview.outages for line in outage_lines(outage, overview.as_of_ms)]
    return [
        *([LiveTable("Root cause", ("what",), outages)] if outages else []),
        *([LiveTable("Not ready", ("reason",), [(reason,) for reason in not_ready])] if not_ready else []),
        LiveTable(f"tidegate at {url}", ("flow", "per second"), list(_flows(before, now)), ("per second",)),
        LiveTable(
            "Fetch by tier",
            ("tier", "per second", "p50", "p99"),
            list(_fetches(before, now)),
            ("per second", "p50", "p99"),
        ),
        LiveTable("Now", ("what", "value"), list(_present(now)), ("value",)),
        LiveTable(
            "Topics with the largest backlog",
            ("topic", "not copied", "behind", "copied per second", "remote"),
            list(_topics(before, now)),
            ("not copied", "behind", "copied per second", "remote"),
        ),
        LiveTable(
            "Other alarms, and pauses" if outages else "Alarms and pauses", ("about", "alarm"), _alarms(overview)
        ),
    ]


def _flows(before: Scrape, now: Scrape) -> Iterator[tuple[str, str]]:
    for what, name in (
        ("from clients", "tidegate_bytes_from_clients_total"),
        ("from brokers", "tidegate_bytes_from_brokers_total"),
        ("from the remote tier to clients", "tidegate_remote_fetch_bytes_total"),
        ("from the store", "tidegate_remote_reader_downloaded_bytes_total"),
        ("copied to the store", "tidegate_remote_copy_bytes_total"),
    ):
        if name in now.samples:
            yield what, size_text(_rate(before, now, name))


def _fetches(before: Scrape, now: Scrape) -> Iterator[tuple[str, str, str | None, str | None]]:
    tiers = sorted(now.by("tier", f"{_LATENCY}_count", api="Fetch"))
    for tier in tiers:
        labels = {"api": "Fetch", "tier": tier}
        buckets = {
            float(bound): count - before.total(f"{_LATENCY}_bucket", le=bound, **labels)
            for bound, count in now.by("le", f"{_LATENCY}_bucket", **labels).items()
        }
        rate = _rate(before, now, f"{_LATENCY}_count", **labels)
        name = "local, with long polls" if tier == "local" else tier
        yield name, f"{rate:.1f}", quantile_text(buckets, 0.5), quantile_text(buckets, 0.99)


def _present(now: Scrape) -> Iterator[tuple[str, str | None]]:
    yield "connections of clients", f"{now.total('tidegate_open_connections'):.0f}"
    yield "partitions owned", f"{now.total('tidegate_owned_partitions'):.0f}"
    # Only owners know the backlog. While no broker answers, no process is an owner.
    backlog, behind = "tidegate_remote_copy_lag_bytes", "tidegate_remote_oldest_uncopied_seconds"
    yield "not copied", size_text(now.total(backlog)) if backlog in now.samples else None
    yield "longest behind", f"{_most(now, behind):.0f} s" if behind in now.samples else None
    yield "Fetches that wait for the store", f"{now.total('tidegate_remote_fetch_pending'):.0f}"
    for name, what in (
        ("tidegate_unfit", "unfit processes"),
        ("tidegate_remote_reader_circuit_open", "stores whose reads are rejected"),
        ("tidegate_remote_storage_write_circuit_open", "stores whose writes are rejected"),
    ):
        if now.total(name):
            yield what, f"{now.total(name):.0f}"


def _topics(before: Scrape, now: Scrape) -> Iterator[tuple[str, str, str, str, str]]:
    backlog = now.by("topic", "tidegate_remote_copy_lag_bytes")
    sizes = now.by("topic", "tidegate_remote_log_size_bytes")
    behind: dict[str, float] = {}
    for labels, value in now.of("tidegate_remote_oldest_uncopied_seconds"):
        behind[labels["topic"]] = max(behind.get(labels["topic"], 0.0), value)
    names = sorted(backlog.keys() | sizes.keys(), key=lambda name: (-backlog.get(name, 0), -sizes.get(name, 0), name))
    for name in names[:_TOPICS]:
        yield (
            name,
            size_text(backlog.get(name, 0)),
            f"{behind.get(name, 0):.0f} s",
            size_text(_rate(before, now, "tidegate_remote_copy_bytes_total", topic=name)),
            size_text(sizes.get(name, 0)),
        )


def _alarms(overview: Overview) -> list[tuple[str, str]]:
    alarms = [(each.about, each.name) for each in overview.alarms]
    paused = () if overview.cluster is None else overview.cluster.paused
    return [*alarms, *((each.topic, f"paused: {each.reason}") for each in paused)]


def _rate(before: Scrape, now: Scrape, name: str, **labels: str) -> float:
    """Returns the increase per second. A process that was restarted counts from 0."""
    return max(0.0, now.total(name, **labels) - before.total(name, **labels)) / max(1e-3, now.at_s - before.at_s)


def _most(now: Scrape, name: str) -> float:
    return max((value for _, value in now.of(name)), default=0.0)


def quantile_text(buckets: dict[float, float], share: float) -> str | None:
    """Returns the upper bound of the bucket with that quantile. `buckets` are cumulative counts by upper bound."""
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    bound = next(bound for bound in sorted(buckets) if buckets[bound] >= share * total)
    finite = [each for each in buckets if each != float("inf")]
    return f"> {max(finite) * 1000:g} ms" if bound == float("inf") else f"<= {bound * 1000:g} ms"
