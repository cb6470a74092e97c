"""Runs clients that are programs. Each call is one process. Exit code 3: the offset is out of range."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from tests.support.clients.client import TIMEOUT_S, OffsetOutOfRange

_OUT_OF_RANGE = 3


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, stdin: bytes = b"") -> bytes:
    """Returns the program's standard output. Raises `OffsetOutOfRange`, or `RuntimeError` with the error output."""
    done = subprocess.run(
        command, env=environment, input=stdin, capture_output=True, timeout=2 * TIMEOUT_S, check=False
    )
    if done.returncode == _OUT_OF_RANGE:
        raise OffsetOutOfRange
    if done.returncode:
        raise RuntimeError(done.stderr.decode().strip())
    return done.stdout
