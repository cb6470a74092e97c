"""`tidegate top` shows rates between two scrapes, and ends with one line when the process is gone."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from rich.console import Console

from proxy import cli
from proxy.commands.scrape import Scrape, admin_client, parse_scrape
from proxy.commands.top import quantile_text, screens, tables
from proxy.config import AdminConfig
from proxy.process.admin.access import admin_access
from proxy.process.admin.http import Health, admin_http
from tests.support.proxy.parsed_config import parse_config
from tiers.access.open_tier import RemoteTierError
from tiers.commands.console import LiveTable, show_live

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
# TYPE tidegate_remote_copy_lag_seconds gauge
tidegate_remote_copy_lag_seconds{topic="orders",partition="0"} 7
tidegate_remote_copy_lag_seconds{topic="orders",partition="1"} 61
# TYPE tidegate_remote_log_alarm gauge
tidegate_remote_log_alarm{topic="orders",reason="copy-lag"} 1
tidegate_remote_log_alarm{topic="orders",reason="gap"} 0
# TYPE tidegate_paused gauge
tidegate_paused{topic="orders",work="trimming"} 1
"""


def scrapes() -> tuple[Scrape, Scrape]:
    return parse_scrape(FIRST, 10.0), parse_scrape(SECOND, 12.0)


def by_title(shown: list[LiveTable]) -> dict[str, list[tuple[object, ...]]]:
    return {table.title: [tuple(row) for row in table.rows] for table in shown}


def test_a_rate_is_the_increase_over_all_processes() -> None:
    found = by_title(tables(*scrapes(), "http://here"))
    assert found["tidegate at http://here"] == [("from brokers", "4.88 KiB"), ("copied to the store", "1.91 MiB")]
    assert found["Fetch by tier"] == [("remote", "5.0", "<= 100 ms", "<= 1000 ms")]
    assert ("not copied", "1.96 KiB") in found["Now"]
    assert ("longest behind", "61 s") in found["Now"]


def test_topics_come_by_their_backlog_and_alarms_while_they_last() -> None:
    found = by_title(tables(*scrapes()))
    assert found["Topics with the largest backlog"] == [
        ("orders", "1.95 KiB", "61 s", "1.91 MiB", "0 B"),
        ("clicks", "5 B", "0 s", "0 B", "0 B"),
    ]
    assert found["Alarms and pauses"] == [("orders", "copy-lag"), ("orders", "trimming is paused")]


def test_each_alarm_of_the_processes_and_of_the_tier_is_one_row() -> None:
    more = "".join(
        f'tidegate_process_alarm{{alarm="{alarm}",process="worker-{number}"}} {value}\n'
        for number in (1, 2)
        for alarm, value in (("certificates-unusable", 1), ("missing-right", 0))
    )
    more += 'tidegate_unfit{process="remote-log"} 1\ntidegate_remote_log_metadata_alarm{process="remote-log"} 0\n'
    first, _ = scrapes()
    found = by_title(tables(first, parse_scrape(more, 12.0)))
    assert found["Alarms and pauses"] == [("-", "certificates-unusable"), ("-", "unfit")]


def test_a_restarted_process_has_no_negative_rate() -> None:
    first, second = scrapes()
    assert by_title(tables(second, first))["tidegate at "] == [("from brokers", "0 B"), ("copied to the store", "0 B")]


@pytest.mark.parametrize(
    ("buckets", "text"),
    [({0.1: 0.0, float("inf"): 0.0}, None), ({0.1: 1.0, float("inf"): 2.0}, "> 100 ms"), ({}, None)],
)
def test_a_quantile_is_a_bound(buckets: dict[float, float], text: str | None) -> None:
    assert quantile_text(buckets, 0.99) == text


async def one_screen() -> AsyncIterator[list[LiveTable]]:
    yield [LiveTable("First", ("what", "value"), [("a", 1)], ("value",))]
    yield [LiveTable("Second", ("what", "value"), [("b", None)], ("value",))]


async def test_without_a_terminal_one_snapshot_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    await show_live(one_screen())
    assert [line.split() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")] == [
        ["First"],
        ["what", "value"],
        ["a", "1"],
    ]


async def test_a_terminal_shows_every_screen() -> None:
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
    health = Health(list, lambda: reasons)
    async with admin_http(("127.0.0.1", 0), registry, health, access=admin_access(guarded)) as (_, port):
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
    async with admin_client(config) as admin:
        with pytest.raises(RemoteTierError, match=r"no process answers at http://127.0.0.1:\d+: is `tidegate serve`"):
            await admin.scrape()


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


def test_the_address_everywhere_is_asked_at_loopback() -> None:
    config = parse_config(f"{SETTINGS.replace('127.0.0.1', '127.0.0.1')}port = 9190\n").admin
    everywhere = config.model_copy(update={"host": "::"})

    async def url() -> str:
        async with admin_client(everywhere) as admin:
            return admin.url

    assert asyncio.run(url()) == "http://[::1]:9190"
