"""SIGTERM ends a proxy well at any moment of its start."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from proxy.admin.facts import ProcessState
from proxy.config import TidegateConfig
from proxy.process.admin.process_view import ProcessView
from proxy.process.app import run
from proxy.process.role import Role
from proxy.wire.error_log import Incident
from tests.support.marks import full
from tests.support.proxy.parsed_config import parse_config
from tests.support.proxy.waiting_signal import waiting_sigterm
from tests.support.repository import ROOT
from tests.support.servers.ports import free_ports
from tests.support.tiers.waiting import until

TIMEOUT_S = 300.0
TIERED = """
[upstream]
bootstrap.servers = "127.0.0.1:1"
[storage]
implementation = "local"
path = "tier"
[[topics]]
name = "orders"
[admin]
port = 0
"""


def holds(pid: int, number: signal.Signals) -> bool:
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("SigBlk:")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


@asynccontextmanager
async def serving(folder: Path, workers: int, streams: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    """`streams` are redirections of a shell."""
    config, (port,) = folder / "tidegate.toml", free_ports(1)
    config.write_text(
        f'workers = {workers}\n[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[admin]\nport = 0\n'
        f'[listener]\nhost = "127.0.0.1"\nbootstrap.port = {port}\nbase.port = {port}\n'
    )
    command = f"exec {sys.executable} -m proxy serve --config {config} {streams}"
    process = await asyncio.create_subprocess_shell(command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(("workers", "said"), [(0, "stopped"), (2, "all processes ended")])
async def test_sigterm_during_the_imports_ends_a_proxy_well(tmp_path: Path, workers: int, said: str) -> None:
    """A process holds SIGHUP from its first line on, so the test can see that line."""
    async with serving(tmp_path, workers) as process:
        await until(lambda: holds(process.pid, signal.SIGHUP))
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
    assert process.returncode == 0
    assert said in log.decode()


@pytest.mark.parametrize("closed", ["<&- >&-", *full("<&-", ">&-")])
async def test_a_proxy_whose_caller_closed_standard_streams_ends_well(tmp_path: Path, closed: str) -> None:
    """Otherwise other descriptors get their numbers, and libuv aborts when it closes one of them."""
    async with serving(tmp_path, 0, closed) as process:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            if b"serving" in line:
                break
        process.send_signal(signal.SIGTERM)
        rest = await process.stderr.read()
        assert (await process.wait(), b"Assertion" in rest) == (0, False), rest.decode()


class HangingRole:
    """A role of which one part never opens."""

    state = ProcessState.INITIALIZING

    def __init__(self, config: TidegateConfig, registry: CollectorRegistry, hangs_in: str) -> None:
        self.view = ProcessView(registry)
        self._hangs_in = hangs_in

    def not_serving(self) -> list[str]:
        return []

    def not_ready(self) -> list[str]:
        return []

    def errors(self) -> Sequence[Incident]:
        return ()

    async def open(self, stack: AsyncExitStack) -> None:
        await self._open("open")

    async def open_tier(self, stack: AsyncExitStack) -> None:
        await self._open("open_tier")

    async def _open(self, part: str) -> None:
        if part == self._hangs_in:
            await asyncio.Event().wait()


@pytest.mark.parametrize("hangs_in", ["open", "open_tier"])
async def test_a_signal_that_waits_ends_a_start_that_hangs(hangs_in: str, caplog: pytest.LogCaptureFixture) -> None:
    def make(config: TidegateConfig, registry: CollectorRegistry) -> Role:
        return cast(Role, HangingRole(config, registry, hangs_in))

    with waiting_sigterm(), caplog.at_level(logging.INFO):
        async with asyncio.timeout(60):
            await run(parse_config(TIERED), make_role=make)
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert caplog.messages[-1] == "stopped"
