"""`workers = N` as a user starts it, without a cluster; and the merge of several metric pages into one."""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.process import processes
from proxy.process.processes import merge_metrics
from proxy.process.remote_log import metadata_folder
from proxy.wire.server import bind
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.broker.wire import connected
from tests.support.proxy.parsed_config import parse_config
from tests.support.proxy.systemd import systemd
from tests.support.proxy.waiting_signal import waiting_sigterm
from tests.support.servers.ports import free_ports
from tiers.access.open_tier import RemoteTierError
from tiers.metadata.state.layout import LOCK_FILE

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 300.0
WORKERS = {"worker-1", "worker-2"}


@asynccontextmanager
async def tidegate(
    folder: Path, port: int, admin_port: int, upstream: str = "127.0.0.1:1", base_port: int = 9100
) -> AsyncIterator[asyncio.subprocess.Process]:
    config = folder / f"tidegate-{port}.toml"
    config.write_text(
        f"""
workers = 2
[upstream]
bootstrap.servers = "{upstream}"
[listener]
host = "127.0.0.1"
bootstrap.port = {port}
base.port = {base_port}
[admin]
port = {admin_port}
"""
    )
    command = [sys.executable, "-m", "proxy", "serve", "--config", str(config)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def get(port: int, path: str) -> tuple[int, str]:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, await response.text()
    except aiohttp.ClientError:
        return 0, ""


async def test_one_admin_port_speaks_for_all(tmp_path: Path) -> None:
    port, admin_port = free_ports(2)
    async with tidegate(tmp_path, port, admin_port) as process, asyncio.timeout(TIMEOUT_S):
        status, text = 0, ""
        unread = "the proxy has not read the cluster yet"
        while {line.partition(": ")[0] for line in text.splitlines() if f": {unread}: " in line} != WORKERS:
            await asyncio.sleep(0.05)
            status, text = await get(admin_port, "/readyz")
        assert status == 503
        assert {f"{worker}: state: INITIALIZING" for worker in WORKERS} <= set(text.splitlines())
        assert await get(admin_port, "/livez") == (200, "live\n")
        assert (await get(admin_port, "/servez"))[0] == 503
        expected = {
            (name, worker)
            for name in ("tidegate_process_up", "tidegate_open_connections", "tidegate_process_state")
            for worker in WORKERS
        }
        series: set[tuple[str, str | None]] = set()
        while not expected <= series:  # a child that is too busy to answer in time is left out
            _, metrics = await get(admin_port, "/metrics")
            series = {
                (sample.name, sample.labels.get("process"))
                for family in text_string_to_metric_families(metrics)
                for sample in family.samples
            }
        async with connected(port) as client:
            await client.send_raw(b"\xff\xff\xff\xff")
            assert await client.ended() == b""
        entries: list[dict[str, object]] = []
        while not entries:
            entries = json.loads((await get(admin_port, "/api/v1/errors"))[1])["errors"]
        assert [(entry["kind"], entry["reason"]) for entry in entries] == [
            ("undecodable", "a frame with the negative length -1")
        ]
        assert entries[0]["process"] in WORKERS
        overview = json.loads((await get(admin_port, "/api/v1/overview"))[1])
        assert {each["name"] for each in overview["processes"]} == WORKERS
        assert all(each["pid"] for each in overview["processes"])
        for path in ("/", "/settings", "/errors"):
            status, page = await get(admin_port, path)
            assert (status, page.startswith("<!doctype html>")) == (200, True)
        assert (await get(admin_port, "/api/v1/topics"))[0] == 503
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


def add_settings(folder: Path, settings: str) -> None:
    (file,) = folder.glob("*.toml")
    file.write_text(f"{file.read_text()}{settings}")


async def test_a_reload_reaches_every_process(tmp_path: Path) -> None:
    port, admin_port = free_ports(2)
    async with tidegate(tmp_path, port, admin_port) as process, asyncio.timeout(TIMEOUT_S):
        said: set[str] = set()
        while said != WORKERS:
            await asyncio.sleep(0.05)
            _, text = await get(admin_port, "/readyz")
            said = {line.partition(": ")[0] for line in text.splitlines() if ": state: INITIALIZING" in line}
        add_settings(tmp_path, '[limits]\nmax.connections = 4\n[log]\nformat = "json"\n')
        process.send_signal(signal.SIGHUP)
        reloaded, output = list[str](), ""
        assert process.stderr is not None
        while len(reloaded) < 3:
            line = (await process.stderr.readline()).decode()
            assert line, "the proxy ended"
            output += line
            if "the settings are reloaded: changed [limits] max.connections" in line:
                reloaded.append(line.rpartition("child=")[2].strip())
        assert set(reloaded) > WORKERS
        shown = json.loads((await get(admin_port, "/api/v1/settings"))[1])["settings"]
        assert [each["value"] for each in shown if each["key"] == "max.connections"] == ["4"]
        process.send_signal(signal.SIGTERM)
        output += (await process.stderr.read()).decode()
        assert await process.wait() == 0
    assert "these changed settings need a restart: [log] format" in output


async def test_systemd_reads_reports_of_the_main_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, admin_port, base_port = free_ports(3)
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with systemd(address) as reports:
        async with ScriptedBroker(1) as broker, asyncio.timeout(TIMEOUT_S):
            upstream = f"127.0.0.1:{broker.port}"
            async with tidegate(tmp_path, port, admin_port, upstream, base_port - 1) as process:
                report, sender = await reports.next_and_sender()
                while report[0].startswith("STATUS="):
                    report, sender = await reports.next_and_sender()
                assert (report[0], sender) == ("READY=1", process.pid)
                assert await get(admin_port, "/readyz") == (200, "ready\n")
                process.send_signal(signal.SIGHUP)
                assert (await reports.next())[0] == "RELOADING=1"
                assert (await reports.next())[0] == "READY=1"
                process.send_signal(signal.SIGTERM)
                assert await reports.next_and_sender() == (["STOPPING=1"], process.pid)
                assert await process.wait() == 0
        assert reports.is_empty()


class TimeThatPasses:
    """A clock that passes while the code sleeps. `events` happen at their seconds."""

    def __init__(self, events: Mapping[int, Callable[[], object]]) -> None:
        self.now_s = 0.0
        self._events = dict(events)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for at_s in [at_s for at_s in self._events if at_s <= self.now_s]:
            self._events.pop(at_s)()

    def monotonic_ms(self) -> int:
        return int(self.now_s * 1000)


@pytest.fixture
def died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], float]]:
    """Begins after a supervisor died whose children let the state and then the port go; returns when, in seconds."""
    (port,) = free_ports(1)
    config = parse_config(
        f"""
workers = 2
[upstream]
bootstrap.servers = "127.0.0.1:1"
[listener]
host = "127.0.0.1"
bootstrap.port = {port}
[state]
path = "{tmp_path}"
[storage]
implementation = "local"
path = "{tmp_path}"
[limits]
drain.timeout.ms = "20s"
"""
    )
    metadata_folder(config).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        state = stack.enter_context((metadata_folder(config) / LOCK_FILE).open("ab"))
        fcntl.flock(state, fcntl.LOCK_EX)
        listener = stack.enter_context(bind("127.0.0.1", port, reuse_port=True))

        def begin(state_s: int, port_s: int) -> float:
            passing = TimeThatPasses({state_s: state.close, port_s: listener.close})
            monkeypatch.setattr(processes, "monotonic_ms", passing.monotonic_ms)
            monkeypatch.setattr("proxy.process.processes.time.sleep", passing.sleep)
            processes._begin_alone(config)
            return passing.now_s

        yield begin


def test_the_children_of_a_dead_supervisor_have_time_to_end(
    died: Callable[[int, int], float],
) -> None:
    assert 27 <= died(25, 27) < 28


def test_a_signal_ends_the_wait(died: Callable[[int, int], float]) -> None:
    with waiting_sigterm():
        assert died(25, 27) == 0


def test_another_proxy_that_lives_ends_the_start(died: Callable[[int, int], float]) -> None:
    with pytest.raises(RemoteTierError, match="another process writes the state"):
        died(100, 100)


def test_a_used_port_or_a_missing_state_ends_the_start_soon(died: Callable[[int, int], float]) -> None:
    with pytest.raises(OSError, match="in use"):
        died(0, 10)


def test_expositions_are_merged_by_family() -> None:
    one = '# HELP requests_total Requests.\n# TYPE requests_total counter\nrequests_total{api="Fetch"} 3.0\n'
    two = one.replace("3.0", "4.0") + "# HELP up Up.\n# TYPE up gauge\nup 1.0\n"
    merged = merge_metrics({"a": one, "b": two}).decode()
    assert merged.count("# TYPE requests_total counter") == 1
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(merged)
        for sample in family.samples
    }
    assert found == {
        ("requests_total", ("api", "Fetch"), ("process", "a")): 3.0,
        ("requests_total", ("api", "Fetch"), ("process", "b")): 4.0,
        ("up", ("process", "b")): 1.0,
    }
