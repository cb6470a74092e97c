"""Reads the kernel's own accounts in `/proc`: CPU seconds and memory of processes, and the load of the machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NOISY_SHARE = 0.1
"""A round is noisy if other programs took more than this share of the machine's CPU time."""

Processes = Callable[[], Iterable[int]]
"""Returns the ids of the processes of a server. A server may replace its processes."""


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process started, and those that these started. Some of them may be gone already."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, (thread / "children").read_text().split()):
                    found += [child, *descendants(child)]
    return found


def tree(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    return [pid, *descendants(pid)]


def cpu_seconds(pids: Iterable[int], *, with_ended_children: bool = False) -> float:
    """Returns the user and system time of processes so far. A process that is gone has none.

    `with_ended_children` adds the time of children that have ended and that their parent has waited for."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11 : 15 if with_ended_children else 13]))
    return ticks / TICKS_PER_S


def resident_mib(pids: Iterable[int]) -> float:
    """Returns the proportional set size of processes: a page that several of them share counts once."""
    kib = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            kib += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return kib / 1024


def busy_seconds() -> float:
    """Returns the CPU time that all processors of the machine have spent on work, or that the hypervisor took away."""
    user, nice, system, _, _, interrupts, soft_interrupts, stolen, *_ = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + interrupts + soft_interrupts + stolen) / TICKS_PER_S


@dataclass(frozen=True, slots=True)
class Span:
    """What the kernel accounted for a span of time."""

    seconds: float
    cpu_s: Mapping[str, float]
    """The CPU seconds of each watched server."""
    foreign_share: float
    """The share of the machine's CPU time that went to programs other than this run, or to other machines."""
    load: float
    """The load average of the last minute, at the end of the span."""

    @property
    def is_noisy(self) -> bool:
        return self.foreign_share > NOISY_SHARE


class Watch:
    """A context manager that accounts for the time inside of it. `span` has the account afterwards.

    The servers of a run are descendants of this process."""

    def __init__(self, servers: Mapping[str, Processes]) -> None:
        self._servers = servers
        self._span: Span | None = None

    @property
    def span(self) -> Span:
        if self._span is None:
            raise RuntimeError("the watch has not ended")
        return self._span

    def __enter__(self) -> Self:
        self._before = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        began, busy_before, own_before, cpu_before = self._before
        ended, busy, own, cpu = self._now()
        capacity_s = (ended - began) * (os.cpu_count() or 1)
        self._span = Span(
            seconds=ended - began,
            cpu_s={name: cpu[name] - cpu_before[name] for name in cpu},
            foreign_share=max(0.0, (busy - busy_before) - (own - own_before)) / capacity_s,
            load=os.getloadavg()[0],
        )

    def _now(self) -> tuple[float, float, float, dict[str, float]]:
        own = cpu_seconds(tree(os.getpid()), with_ended_children=True)
        cpu = {name: cpu_seconds(processes()) for name, processes in self._servers.items()}
        return time.monotonic(), busy_seconds(), own, cpu


def machine() -> dict[str, str | int]:
    """Returns what a reader of the figures needs to know about the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "processor": model,
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory_kib / (1 << 20)),
        "kernel": os.uname().release,
    }
