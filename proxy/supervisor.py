"""`Supervisor`: starts processes, starts again what dies, ends them in order, leaves none behind.

* A child's standard input is a pipe: the supervisor writes what the child needs to know and keeps it open as long as it
  lives itself, so that end of file tells the child that it was left alone.
* A child that ends is started again after a backoff that grows while it keeps dying soon. Only one whose first life
  soon ends with `UNUSABLE` ends the start as a whole: somebody has to change something.
* One event loop, no threads of its own. Children are spawned: nothing of this process goes on in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tiers.broker.client import monotonic_ms

logger = logging.getLogger(__name__)

UNUSABLE = os.EX_CONFIG
"""The exit code of a child that cannot begin until somebody changes something; it has said what."""

_BACKOFF_BASE_MS = 100
_BACKOFF_CAP_MS = 10_000
_STEADY_MS = 60_000
"""A child that lived so long had begun: its next death counts as its first, and never as a failed start."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """`stdin` is written at once; the pipe then stays open."""

    name: str
    command: Sequence[str]
    stdin: bytes = b""
    environment: Mapping[str, str] | None = None
    pass_fds: Sequence[int] = field(default=())


class Child:
    """One process at a time, again and again."""

    def __init__(self, command: ChildCommand, clock_ms: Callable[[], int], jitter: Callable[[], float]) -> None:
        self.name = command.name
        self.lives = 0
        self.process: asyncio.subprocess.Process | None = None
        """None between two lives."""
        self.is_unusable = False
        self.ended_badly = False
        """Whether it had to be killed, or failed, after it was asked to end."""
        self._command = command
        self._clock_ms = clock_ms
        self._jitter = jitter
        self._ending = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def restarts(self) -> int:
        return max(0, self.lives - 1)

    async def keep(self, on_unusable: Callable[[], None]) -> None:
        """Until `end`, or until the child turns out to be unusable."""
        try:
            deaths = 0
            while not self._ending.is_set():
                began_at_ms = self._clock_ms()
                code = await self._live()
                if self._ending.is_set():
                    self.ended_badly |= code not in (0, -signal.SIGTERM)
                    return
                lived_ms = self._clock_ms() - began_at_ms
                if code == UNUSABLE and self.lives == 1 and lived_ms < _STEADY_MS:
                    self.is_unusable = True
                    on_unusable()
                    return
                deaths = 1 if lived_ms >= _STEADY_MS else deaths + 1
                delay_ms = min(_BACKOFF_CAP_MS, _BACKOFF_BASE_MS << min(deaths, 10)) * (1 + self._jitter()) / 2
                logger.error(
                    "a process ended and is started again",
                    extra={"child": self.name, "exit_code": code, "delay_ms": round(delay_ms)},
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_ms / 1000):
                        await self._ending.wait()
        finally:
            self._ended.set()

    async def _live(self) -> int:
        """The exit code; negative: the number of the signal."""
        command = self._command
        self.lives += 1
        process = await asyncio.create_subprocess_exec(
            *command.command,
            stdin=asyncio.subprocess.PIPE,
            env=None if command.environment is None else dict(command.environment),
            pass_fds=command.pass_fds,
        )
        self.process = process
        assert process.stdin is not None
        try:
            if self._ending.is_set():
                process.terminate()
            with contextlib.suppress(ConnectionError):  # it died already: the exit code says more
                process.stdin.write(command.stdin)
                await process.stdin.drain()
            return await process.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            process.stdin.close()
            self.process = None

    def terminate(self) -> None:
        """Ends this life and begins no other."""
        self._ending.set()
        self._send(signal.SIGTERM)

    async def wait_ended(self, timeout_ms: int) -> None:
        """What outlives the timeout is killed."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._ended.wait()
        except TimeoutError:
            logger.error("a process did not end in time and is killed", extra={"child": self.name})
            self._send(signal.SIGKILL)
            await self._ended.wait()

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """`stages` are ended one after the other, the children of one stage together."""

    def __init__(
        self,
        stages: Sequence[Sequence[ChildCommand]],
        *,
        stop_timeout_ms: int,
        clock_ms: Callable[[], int] = monotonic_ms,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._stages = [[Child(command, clock_ms, jitter) for command in stage] for stage in stages]
        self._stop_timeout_ms = stop_timeout_ms
        self.is_stopping = False

    @property
    def children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    async def run(self, stop: asyncio.Event) -> bool:
        """Until `stop`, or until a child turns out to be unusable; whether all went and ended well."""
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(child.keep(stop.set))
            await stop.wait()
            self.is_stopping = True
            for stage in self._stages:
                for child in stage:
                    child.terminate()
                await asyncio.gather(*(child.wait_ended(self._stop_timeout_ms) for child in stage))
        return not any(child.is_unusable or child.ended_badly for child in self.children)
