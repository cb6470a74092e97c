"""`tidegate top` shows the overview of a proxy, and ends with one line when the process is gone."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from proxy import cli
from proxy.admin.facts import (
    Outage,
    Overview,
    PausedTopic,
    ProcessState,
    RaisedAlarm,
    Series,
    TierBytes,
    TopicLine,
    TopicQuery,
    TopicsPage,
)
from proxy.admin.source import FactsUnavailableError
from proxy.admin.words import NOTHING
from proxy.commands.admin_client import admin_client
from proxy.commands.top import screens, tables
from proxy.config import AdminConfig
from proxy.process.admin.access import admin_access
from proxy.process.admin.http import admin_pages
from tests.support.proxy.page_facts import NOW_MS, NoPages, ScriptedFacts
from tiers.access.open_tier import RemoteTierError
from tiers.commands.console import LiveTable, show_live
from tiers.errors import Peer

SETTINGS = '[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[admin]\nhost = "127.0.0.1"\n'


BEHIND = TopicLine("orders", "a", "tiered", bytes=TierBytes(1024, 2048, 2000), backlog_bytes=2000, backlog_ms=61_000)


async def overview(**changes: Any) -> Overview:
    return replace(await ScriptedFacts().overview(), **changes)


def by_title(shown: list[LiveTable]) -> dict[str, list[tuple[object, ...]]]:
    return {table.title: [tuple(row) for row in table.rows] for table in shown}


async def test_rates_backlogs_alarms_and_pauses_are_rows() -> None:
    quiet = await overview()
    assert quiet.cluster is not None
    paused = replace(quiet.cluster, paused=(PausedTopic("orders", "an operator paused trimming"),))
    alarms = (RaisedAlarm("copy-lag", "orders, 2 partitions"), RaisedAlarm("missing-right", "worker-1, worker-2"))
    series = (
        Series("local_p50", "ms", (1.0, 0.5)),
        Series("remote_bytes", "B/s", (1.0, 2048.0)),
        Series("remote_p99", "ms", (1.0, None)),
        Series("copied_bytes", "B/s", (1.0, 2_000_000.0)),
        Series("cache_hits", "%", (1.0, 97.0)),
    )
    topics = TopicsPage(0, TopicQuery(), 2, 2, 2, 1, TierBytes(), (BEHIND, TopicLine("clicks", "b", "refused")))
    history = replace(quiet.history, series=series)
    reader = replace(quiet.processes[3], state=ProcessState.FAILED, reasons=("it died", "it starts again"))
    processes = (*quiet.processes[:3], reader)
    found = by_title(
        tables(
            replace(quiet, alarms=alarms, cluster=paused, history=history, processes=processes), topics, "http://here"
        )
    )
    assert found["tidegate at http://here"] == [
        ("local, with long polls", "0.50 ms", None, None),
        ("remote", None, None, "2.00 KiB/s"),
    ]
    assert found["Remote tier"] == [
        ("copied to the store", "1.91 MiB/s"),
        ("not copied", None),
        ("chunks found in caches", "97 %"),
        ("clients that wait for the remote tier", "0"),
    ]
    assert found["Processes"][2:] == [
        ("remote-log", "SERVING", None, "140 MiB", 1, ""),
        ("remote-reader", "FAILED", None, "320 MiB", 0, "it died; it starts again"),
    ]
    assert found["Largest backlogs"] == [
        ("orders", "1.95 KiB", "1 min 1 s", "3.00 KiB", "tiered"),
        ("clicks", NOTHING, NOTHING, "0 B", "refused"),
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
    found = by_title(tables(await overview(outages=(outage,), alarms=(lag,))))
    assert next(iter(found)) == "Root cause"
    (title,), *rest = found["Root cause"]
    assert str(title).startswith("store s3 at http://s3: connection refused since ")
    assert rest == [("  the copying of 3 partitions waits",), ("  unfit: remote-log",)]
    assert found["Other alarms, and pauses"] == [("orders", "copy-lag")]


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


async def test_the_screens_come_from_the_admin_port(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    guarded = AdminConfig.model_validate({"token.file": token, "port": 1})

    class Facts(ScriptedFacts):
        async def topics(self, query: TopicQuery) -> TopicsPage:
            if self.dead_store:
                raise FactsUnavailableError("no process answers")
            return await super().topics(query)

    facts = Facts()
    async with admin_pages(("127.0.0.1", 0), NoPages(), facts, admin_access(guarded)) as (_, port):
        config = AdminConfig.model_validate({"token.file": token, "port": port})
        async with admin_client(config) as admin:
            shown = screens(admin, 0.01)
            backlogs = by_title(list(await anext(shown)))["Largest backlogs"]
            lines = [line for line, _ in facts.topic_lines.values()]
            largest = max(lines, key=lambda line: line.backlog_bytes or 0)
            assert (len(backlogs), backlogs[0][0]) == (10, largest.topic)
            facts.dead_store = True
            outage = by_title(list(await anext(shown)))
            assert ("Root cause" in outage, "Largest backlogs" in outage) == (True, False)
        async with admin_client(AdminConfig.model_validate({"port": port})) as stranger:
            with pytest.raises(RemoteTierError, match="asks for a token or a client certificate"):
                await stranger.overview()
        other = tmp_path / "other"
        other.write_text("guess\n")
        async with admin_client(config.model_copy(update={"token_file": other})) as guessing:
            with pytest.raises(RemoteTierError, match=r"refuses the token of \[admin\] token.file"):
                await guessing.overview()
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
