"""Stops processes (SIGSTOP), and returns when they stand still.

The signal reaches the threads of a process one after the other. On a busy machine, some of them went on for 33 ms after
`os.kill` had returned. A broker could then answer a request that a test sent later.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_TIMEOUT_S = 60
_STATE, _GROUP = 0, 2
"""The places behind the name in `/proc/PID/stat`."""


def pause_process(pid: int) -> None:
    """Stops one process. SIGCONT continues it."""
    os.kill(pid, signal.SIGSTOP)
    _wait(lambda: [pid])


def pause_group(group: int) -> None:
    """Stops all processes of a group. SIGCONT to the group continues them."""
    os.killpg(group, signal.SIGSTOP)
    _wait(lambda: _members(group))


def _wait(pids: Callable[[], Iterable[int]]) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while any(state not in "TZX" for pid in pids() for state in _states(pid)):
        if time.monotonic() > deadline_s:
            raise TimeoutError("a process does not stop")
        time.sleep(0.001)


def _members(group: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _fields(folder / "stat")
        if fields and fields[_GROUP] == str(group):
            yield int(folder.name)


def _states(pid: int) -> Iterator[str]:
    """Yields the letters of the states of all threads: "T" while one is stopped."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        if fields := _fields(file):
            yield fields[_STATE]


def _fields(file: Path) -> list[str]:
    try:
        return file.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return []
