"""`workers = N` as a user starts it, before no cluster at all; and how several expositions become one."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.processes import merge_metrics

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
WORKERS = {"worker-1", "worker-2"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def tidegate(folder: Path, port: int, admin_port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    config = folder / "tidegate.toml"
    config.write_text(
        f"""
workers = 2
[upstream]
bootstrap.servers = "127.0.0.1:1"
[listener]
host = "127.0.0.1"
bootstrap.port = {port}
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
    admin_port = free_port()
    async with tidegate(tmp_path, free_port(), admin_port) as process, asyncio.timeout(TIMEOUT_S):
        status, text = 0, ""
        while {line.partition(": the cluster was not read yet")[0] for line in text.splitlines()} != WORKERS:
            await asyncio.sleep(0.05)
            status, text = await get(admin_port, "/readyz")
        assert status == 503
        assert await get(admin_port, "/livez") == (200, "live\n")
        _, metrics = await get(admin_port, "/metrics")
        series = {
            (sample.name, sample.labels.get("process"))
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
        }
        for worker in WORKERS:
            assert {("tidegate_process_up", worker), ("tidegate_open_connections", worker)} <= series
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_port_that_is_taken_ends_the_start(tmp_path: Path, is_shared: bool) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with tidegate(tmp_path, port, 0) as process, asyncio.timeout(TIMEOUT_S):
            _, errors = await process.communicate()
    assert process.returncode == 1
    (said,) = [line for line in errors.decode().splitlines() if line.startswith("tidegate: ")]
    assert str(port) in said
    assert "in use" in said


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


@pytest.mark.parametrize("texts", [{}, {"a": ""}])
def test_nothing_is_merged_to_nothing(texts: dict[str, str]) -> None:
    assert merge_metrics(texts) == b""
