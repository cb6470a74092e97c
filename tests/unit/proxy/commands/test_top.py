"""`tidegate top` shows rates between two scrapes, and ends with one line when the process is gone."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from rich.console import Console

from proxy import cli
from proxy.admin.facts import Outage, Overview, PausedTopic, RaisedAlarm
from proxy.commands.scrape import Scrape, admin_client, parse_scrape
from proxy.commands.top import quantile_text, screens, tables
from proxy.config import AdminConfig
from proxy.process.admin.access import admin_access
from proxy.process.admin.http import admin_pages
from tests.support.proxy.page_facts import NOW_MS, NoPages, ScriptedFacts
from tiers.access.open_tier import RemoteTierError
from tiers.commands.console import LiveTable, show_live
from tiers.errors import Peer

SETTINGS = '[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[admin]\nhost = "127.0.0.1"\n'
FIRST = """\
# TYPE tidegate_bytes_from_brokers_total counter
tidegate_bytes_from_brokers_total{process="worker-1"} 1000
tidegate_bytes_from_brokers_total{process="worker-2"} 0
# TYPE tidegate_remote_copy_bytes_total counter
tidegate_remote_copy_bytes_total{topic="orders"} 0
# TYPE tidegate_request_latency_seconds histogram
tidegate_request_latency_seconds_bucket{api="Fetch",tier="remote",le="0.1"} 0
tidegate_request_latency_seconds_bucket{api="Fetch",tier="remote",le="1.0"} 0
tidegate_request_latency_seconds_bucket{api="Fetch",tier="remote",le="+Inf"} 0
tidegate_request_latency_seconds_count{api="Fetch",tier="remote"} 0
"""
SECOND = """\
# TYPE tidegate_bytes_from_brokers_total counter
tidegate_bytes_from_brokers_total{process="worker-1"} 3000
tidegate_bytes_from_brokers_total{process="worker-2"} 8000
# TYPE tidegate_remote_copy_bytes_total counter
tidegate_remote_copy_bytes_total{topic="orders"} 4000000
# TYPE tidegate_request_latency_seconds histogram
tidegate_request_latency_seconds_bucket{api="Fetch",tier="remote",le="0.1"} 9
tidegate_request_latency_seconds_bucket{api="Fetch",tier="remote",le="1.0"} 10
tidegate_request_latency_seconds_bucket{api="Fetch",tier="remote",le="+Inf"} 10
tidegate_request_latency_seconds_count{api="Fetch",tier="remote"} 10
# TYPE tidegate_remote_copy_lag_bytes gauge
tidegate_remote_copy_lag_bytes{topic="clicks",partition="0"} 5
tidegate_remote_copy_lag_bytes{topic="orders",partition="0"} 1500
tidegate_remote_copy_lag_bytes{topic="orders",partition="1"} 500
# TYPE tidegate_remote_oldest_uncopied_seconds gauge
tidegate_remote_oldest_uncopied_seconds{topic="orders",partition="0"} 7
tidegate_remote_oldest_uncopied_seconds{topic="orders",partition="1"} 61
"""


async def overview(**changes: Any) -> Overview:
    return replace(await ScriptedFacts().overview(), **changes)


def scrapes() -> tuple[Scrape, Scrape]:
    return parse_scrape(FIRST, 10.0), parse_scrape(SECOND, 12.0)


def by_title(shown: list[LiveTable]) -> dict[str, list[tuple[object, ...]]]:
    return {table.title: [tuple(row) for row in table.rows] for table in shown}


async def test_rates_backlogs_alarms_and_pauses_are_rows() -> None:
    quiet = await overview()
    assert quiet.cluster is not None
    paused = replace(quiet.cluster, paused=(PausedTopic("orders", "an operator paused trimming"),))
    alarms = (RaisedAlarm("copy-lag", "orders, 2 partitions"), RaisedAlarm("missing-right", "worker-1, worker-2"))
    found = by_title(tables(*scrapes(), replace(quiet, alarms=alarms, cluster=paused), "http://here"))
    assert found["tidegate at http://here"] == [("from brokers", "4.88 KiB"), ("copied to the store", "1.91 MiB")]
    assert found["Fetch by tier"] == [("remote", "5.0", "<= 100 ms", "<= 1000 ms")]
    assert ("not copied", "1.96 KiB") in found["Now"]
    assert ("longest behind", "61 s") in found["Now"]
    assert found["Topics with the largest backlog"] == [
        ("orders", "1.95 KiB", "61 s", "1.91 MiB", "0 B"),
        ("clicks", "5 B", "0 s", "0 B", "0 B"),
    ]
    assert found["Alarms and pauses"] == [
        ("orders, 2 partitions", "copy-lag"),
        ("worker-1, worker-2", "missing-right"),
        ("orders", "paused: an operator paused trimming"),
    ]


async def test_a_root_cause_comes_first_with_what_follows_from_it() -> None:
    what, unfit, lag = "store s3 at http://s3", RaisedAlarm("unfit", "remote-log"), RaisedAlarm("copy-lag", "orders")
    outage = Outage(
        Peer.STORE, "store-failing", what, "connection refused", NOW_MS, partitions=3, consequences=(unfit,)
    )
    found = by_title(tables(*scrapes(), await overview(outages=(outage,), alarms=(lag,))))
    assert next(iter(found)) == "Root cause"
    (title,), *rest = found["Root cause"]
    assert str(title).startswith("store s3 at http://s3: connection refused since ")
    assert rest == [("  the copying of 3 partitions waits",), ("  unfit: remote-log",)]
    assert found["Other alarms, and pauses"] == [("orders", "copy-lag")]


async def test_a_restarted_process_has_no_negative_rate() -> None:
    first, second = scrapes()
    found = by_title(tables(second, first, await overview()))
    assert found["tidegate at "] == [("from brokers", "0 B"), ("copied to the store", "0 B")]


@pytest.mark.parametrize(
    ("buckets", "text"),
    [({0.1: 0.0, float("inf"): 0.0}, None), ({0.1: 1.0, float("inf"): 2.0}, "> 100 ms"), ({}, None)],
)
def test_a_quantile_is_a_bound(buckets: dict[float, float], text: str | None) -> None:
    assert quantile_text(buckets, 0.99) == text


async def one_screen() -> AsyncIterator[list[LiveTable]]:
    yield [LiveTable("First", ("what", "value"), [("a", 1)], ("value",))]
    yield [LiveTable("Second", ("what", "value"), [("b", None)], ("value",))]


async def test_a_terminal_shows_every_screen_and_a_file_one(capsys: pytest.CaptureFixture[str]) -> None:
    await show_live(one_screen())
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    assert shown == [["First"], ["what", "value"], ["a", "1"]]
    out = io.StringIO()
    await show_live(one_screen(), Console(file=out, force_terminal=True, width=60))
    assert "First" in out.getvalue()
    assert re.search(r"b +-", out.getvalue())


async def test_the_screens_come_from_the_admin_port_until_it_is_gone(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    copied = Counter("tidegate_remote_copy_bytes", "x", ["topic"], registry=registry)
    Gauge("tidegate_open_connections", "x", registry=registry).set(3)
    token = tmp_path / "token"
    token.write_text("secret\n")
    guarded = AdminConfig.model_validate({"token.file": token, "port": 1})
    reasons: list[str] = []

    class Pages(NoPages):
        async def metrics(self) -> bytes:
            return generate_latest(registry)

        async def not_ready(self) -> list[str]:
            return reasons

    pages = admin_pages(("127.0.0.1", 0), Pages(), ScriptedFacts(), admin_access(guarded))
    async with pages as (_, port):
        config = AdminConfig.model_validate({"token.file": token, "port": port})
        async with admin_client(config) as admin:
            shown = screens(admin, 0.01)
            copied.labels("orders").inc(7)
            first = by_title(list(await anext(shown)))
            assert first["Now"][0] == ("connections of clients", "3")
            copied.labels("orders").inc(10**9)
            assert ("copied to the store", "0 B") not in next(iter(by_title(list(await anext(shown))).values()))
            reasons.append("no broker answers")
            assert by_title(list(await anext(shown)))["Not ready"] == [("no broker answers",)]
        async with admin_client(AdminConfig.model_validate({"port": port})) as stranger:
            with pytest.raises(RemoteTierError, match="asks for a token or a client certificate"):
                await stranger.scrape()
        other = tmp_path / "other"
        other.write_text("guess\n")
        async with admin_client(config.model_copy(update={"token_file": other})) as guessing:
            with pytest.raises(RemoteTierError, match=r"refuses the token of \[admin\] token.file"):
                await guessing.scrape()
    async with admin_client(config.model_copy(update={"host": "::"})) as everywhere:
        assert everywhere.url == f"http://[::1]:{port}"


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ("port = 0", 2, "the admin port is off: set [admin] port"),
        ("port = 1", 3, "no process answers at http://127.0.0.1:1: is `tidegate serve` running? Connection refused"),
        ("tls.certificate = '/proc/version'", 2, "[admin.tls] certificate: /proc/version: holds no certificate in PEM"),
    ],
)
def test_a_process_that_does_not_answer_is_one_line(
    settings: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tidegate.toml"
    config.write_text(f"{SETTINGS}{settings}\n")
    assert cli.run(["top", "--config", str(config)]) == code
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert said in captured.err


def test_ctrl_c_ends_it_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(settings: object, interval_s: float) -> None:
        raise KeyboardInterrupt

    config = tmp_path / "tidegate.toml"
    config.write_text(SETTINGS)
    monkeypatch.setattr("proxy.commands.top.watch", interrupted)
    assert cli.run(["top", "--config", str(config)]) == 0
