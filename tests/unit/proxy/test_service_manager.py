"""What systemd reads at its socket while a proxy starts, serves, reads its settings again and ends."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from proxy.process.start.service_manager import ServiceManager
from tests.support.proxy.systemd import TIMEOUT_S, systemd

CLOCK_US = 42
READY = ["READY=1", "WATCHDOG=1"]


class Proxy:
    def __init__(self, address: str, watchdog_us: int = 0) -> None:
        self.reasons = ["worker-1: the proxy has not read the cluster yet"]
        self.stop = asyncio.Event()
        environment = {"NOTIFY_SOCKET": address, **({"WATCHDOG_USEC": str(watchdog_us)} if watchdog_us else {})}
        self.manager = ServiceManager(environment, lambda: CLOCK_US)

    async def not_ready(self) -> list[str]:
        return self.reasons

    async def run(self) -> None:
        await self.manager.run(self.not_ready, self.stop)


async def test_a_proxy_is_reported_when_it_is_ready_and_ends(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with systemd(address) as reports:
        proxy = Proxy(address)
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            group.create_task(proxy.run())
            assert await reports.next() == ["STATUS=worker-1: the proxy has not read the cluster yet"]
            proxy.reasons = []
            while (report := await reports.next())[0].startswith("STATUS=worker-1"):
                pass
            assert report == [*READY, "STATUS="]
            proxy.stop.set()
            assert await reports.next() == ["STOPPING=1"]
        assert reports.is_empty()


async def test_the_watchdog_gets_reports_also_while_the_proxy_ends() -> None:
    """The address is an abstract one, as `@` says."""
    name = f"tidegate-test-{os.getpid()}"
    with systemd(f"\0{name}") as reports:
        proxy = Proxy(f"@{name}", watchdog_us=20_000)
        proxy.reasons = []
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            running = group.create_task(proxy.run())
            assert await reports.next() == [*READY, "STATUS="]
            assert [await reports.next() for _ in range(3)] == [READY] * 3
            proxy.stop.set()
            while (report := await reports.next()) == READY:
                pass
            assert report == ["STOPPING=1"]
            assert await reports.next() == ["WATCHDOG=1"]
            running.cancel()


async def test_a_reload_of_a_ready_proxy_is_reported(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with systemd(address) as reports:
        proxy = Proxy(address)
        with proxy.manager.reloading():
            pass
        assert reports.is_empty()
        proxy.reasons = []
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            group.create_task(proxy.run())
            assert await reports.next() == [*READY, "STATUS="]
            with suppress(ValueError), proxy.manager.reloading():
                assert await reports.next() == ["RELOADING=1", f"MONOTONIC_USEC={CLOCK_US}"]
                raise ValueError("wrong settings")
            assert await reports.next() == READY
            proxy.stop.set()


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
async def test_a_proxy_runs_without_a_socket_of_systemd(address: str) -> None:
    proxy = Proxy(address)
    proxy.reasons = []
    proxy.stop.set()
    async with asyncio.timeout(TIMEOUT_S):
        await proxy.run()
