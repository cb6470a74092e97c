"""What a server says in a file of its own, for whoever finds a test failed: its folder may not outlive the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_LINES = 60


class Speaking(Protocol):
    output: Path

    @property
    def running(self) -> bool: ...

    def last_output(self, lines: int) -> str: ...


_heard: list[tuple[str, Speaking]] = []


def hear(name: str, server: Speaking) -> None:
    """From now on it is one of those that `said_since` tells of."""
    _heard.append((name, server))


def said_since(time_s: float) -> Iterator[tuple[str, str]]:
    """Of every server that wrote a line since then (Unix time, in s) and whose folder is still there: its name, whether
    it runs, and its last lines."""
    for name, server in _heard:
        with contextlib.suppress(FileNotFoundError):
            if server.output.stat().st_mtime >= time_s:
                yield f"{name}, which {'runs' if server.running else 'does not run'}", server.last_output(_LINES)
