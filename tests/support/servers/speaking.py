"""Keeps the servers whose output goes into the report of a failed test. Their folders are removed after the run."""

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
    """Adds a server to those that `said_since` reports."""
    _heard.append((name, server))


def said_since(time_s: float) -> Iterator[tuple[str, str]]:
    """Yields the name, the state and the last lines of each server that wrote a line since `time_s` (Unix time, in s).

    Skips servers whose folder is gone."""
    for name, server in _heard:
        with contextlib.suppress(FileNotFoundError):
            if server.output.stat().st_mtime >= time_s:
                yield f"{name}, which {'runs' if server.running else 'does not run'}", server.last_output(_LINES)
