"""`ServiceManager`: reports to systemd that the proxy is ready, runs, reads its settings again, or ends (sd_notify).

A report is one datagram to the socket that NOTIFY_SOCKET names. Nothing is sent without this variable. systemd takes
reports from its main process, so the supervisor alone sends them. A report that the system refuses is not an error.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

_START_INTERVAL_S: Final = 0.5
_ALIVE: Final = "READY=1\nWATCHDOG=1"
"""Each report says again that the proxy is ready, so a lost one delays nothing for long."""


class ServiceManager:
    """`environment` is that of the process. `clock_us` is CLOCK_MONOTONIC in microseconds."""

    def __init__(self, environment: Mapping[str, str], clock_us: Callable[[], int]) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        limit_us = int(environment.get("WATCHDOG_USEC", 0))
        self._interval_s = limit_us / 2_000_000 or None
        self._clock_us = clock_us
        self._is_ready = False

    async def run(self, not_ready: Callable[[], Awaitable[list[str]]], stop: asyncio.Event) -> None:
        """Reports until it is cancelled. The proxy is ready once `not_ready` gives no reason, and ends after `stop`.

        The watchdog of the unit (WATCHDOG_USEC) gets a report twice in its time, as long as the event loop runs."""
        if not self._address:
            return
        while not stop.is_set():
            reasons = [] if self._is_ready else await not_ready()
            if reasons:
                self._send(f"STATUS={'; '.join(reasons)}")
            else:
                self._send(_ALIVE if self._is_ready else f"{_ALIVE}\nSTATUS=")
                self._is_ready = True
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s if self._is_ready else _START_INTERVAL_S):
                    await stop.wait()
        self._is_ready = False
        self._send("STOPPING=1")
        while self._interval_s is not None:
            await asyncio.sleep(self._interval_s)
            self._send("WATCHDOG=1")

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Reports a reload of a ready proxy, and its end."""
        if self._is_ready:
            self._send(f"RELOADING=1\nMONOTONIC_USEC={self._clock_us()}")
        try:
            yield
        finally:
            if self._is_ready:
                self._send(_ALIVE)

    def _send(self, report: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(report.encode(), self._address)
