"""`Supervisor`: starts processes, restarts those that die, ends them in order, and leaves none behind.

* A child reads its task from a socket, which the supervisor keeps open. Its end shows the child that the supervisor is
  dead.
* The supervisor restarts a child that ends, after a backoff that grows while the child keeps dying early. A start that
  the system refuses counts as an early death. If the first life of a child ends early with `UNUSABLE`, the supervisor
  ends all children: an operator must change something.
* The fork server starts the children. If the fork server dies, the supervisor ends, and so do all children.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from proxy.process.fork_server import ForkedProcess, ForkServer, ForkServerLostError
from tiers.backoff import Backoff
from tiers.broker.client import monotonic_ms

logger = logging.getLogger(__name__)

UNUSABLE = os.EX_CONFIG
"""The exit code of a child that cannot start until an operator changes something. It writes why to the supervisor."""

_MAX_REASON_BYTES = 64 << 10
_BACKOFF = Backoff(base_ms=200, cap_ms=10_000)
_STEADY_MS = 60_000
"""A child that lives this long has started well. Its next death counts as the first, and not as a failed start."""


@dataclass(frozen=True, slots=True)
class ChildTask:
    """The task of a child: the bytes that it reads, and the file descriptors that it inherits."""

    name: str
    task: bytes = b""
    fds: Sequence[int] = ()


class Child:
    """One child process, which is started again whenever it dies."""

    def __init__(
        self, task: ChildTask, forks: ForkServer, clock_ms: Callable[[], int], jitter: Callable[[], float]
    ) -> None:
        self.name = task.name
        self.lives = 0
        self.process: ForkedProcess | None = None
        """None between two lives."""
        self.is_unusable = False
        self.reason = ""
        """Why the last process could not start until an operator changes something; empty if it could."""
        self.ended_badly = False
        """Whether the child failed or had to be killed after it was asked to end."""
        self._task = task
        self._forks = forks
        self._writer: asyncio.StreamWriter | None = None
        """The supervisor's end of the socket at which the present process reads its task."""
        self._clock_ms = clock_ms
        self._jitter = jitter
        self._ending = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def restarts(self) -> int:
        return max(0, self.lives - 1)

    async def keep(self, on_unusable: Callable[[], None]) -> None:
        """Starts the process, and restarts it until `stay_down` is called or the child turns out to be unusable."""
        try:
            deaths = 0
            while not self._ending.is_set():
                began_at_ms = self._clock_ms()
                trouble: OSError | None = None
                try:
                    code = await self._live()
                except ForkServerLostError:
                    self.ended_badly = True
                    on_unusable()
                    return
                except OSError as error:  # the system has no process or no memory to give at the moment
                    code, trouble = os.EX_OSERR, error
                if self._ending.is_set():
                    self.ended_badly |= code not in (0, -signal.SIGTERM)
                    return
                lived_ms = self._clock_ms() - began_at_ms
                if code == UNUSABLE and self.lives == 1 and lived_ms < _STEADY_MS:
                    self.is_unusable = True
                    on_unusable()
                    return
                deaths = 1 if lived_ms >= _STEADY_MS else deaths + 1
                delay_ms = _BACKOFF.pause_ms(deaths, self._jitter)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_ms / 1000):
                        await self._ending.wait()
                if self._ending.is_set():  # a signal to the process group ends the children and the supervisor
                    self.ended_badly |= code not in (0, -signal.SIGTERM)
                    return
                extra = {"child": self.name, "exit_code": code, "delay_ms": round(delay_ms)}
                if reason := self.reason if trouble is None else str(trouble):
                    extra["error"] = reason
                logger.error("a process died and is restarted", extra=extra)
        finally:
            self._ended.set()

    async def _live(self) -> int:
        """Runs the process once and returns its exit code. A negative code is the number of a signal."""
        self.lives += 1
        ours, theirs = socket.socketpair()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                process = self.process = await self._forks.fork([theirs.fileno(), *self._task.fds])
            if self._ending.is_set():
                process.send_signal(signal.SIGTERM)
            self._writer.write(self._task.task)  # a reload may have changed it during the start
            code = await process.wait()
            if self._forks.loss is not None:
                raise self._forks.loss
            said = await reader.read(_MAX_REASON_BYTES) if code == UNUSABLE else b""
            self.reason = said.decode(errors="replace")
            return code
        except asyncio.CancelledError:
            self._send(signal.SIGKILL)
            raise
        finally:
            self._writer.close()
            self._writer = self.process = None

    def change_task(self, task: bytes) -> None:
        """Gives the next life of the process another task, and lets the present one read its settings again.

        A byte behind the present task asks for that. A signal would end a process that has only just begun."""
        self._task = replace(self._task, task=task)
        if self.process is not None and self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"\n")

    def stay_down(self) -> None:
        """Starts no other process after the present one."""
        self._ending.set()

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    async def wait_ended(self, timeout_ms: int) -> None:
        """Waits for the end of the process, and kills it at the timeout."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._ended.wait()
        except TimeoutError:
            logger.error("a process did not end in time and is killed", extra={"child": self.name})
            self._send(signal.SIGKILL)
            await self._ended.wait()

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)


class Supervisor:
    """Supervises children in `stages`. It ends the stages one after the other, and the children of a stage together."""

    def __init__(
        self,
        stages: Sequence[Sequence[ChildTask]],
        forks: ForkServer,
        *,
        stop_timeout_ms: int,
        clock_ms: Callable[[], int] = monotonic_ms,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._stages = [[Child(task, forks, clock_ms, jitter) for task in stage] for stage in stages]
        self.stop_timeout_ms = stop_timeout_ms
        """How long a child may take to end. It may change at any time."""
        self.is_stopping = False

    @property
    def children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    async def run(self, stop: asyncio.Event) -> bool:
        """Runs until `stop` is set or a child turns out to be unusable.

        Returns whether all children were usable and ended well."""
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(child.keep(stop.set))
            await stop.wait()
            self.is_stopping = True
            for child in self.children:
                child.stay_down()
            for stage in self._stages:
                for child in stage:
                    child.terminate()
                await asyncio.gather(*(child.wait_ended(self.stop_timeout_ms) for child in stage))
        return not any(child.is_unusable or child.ended_badly for child in self.children)
