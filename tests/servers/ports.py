"""Ports for servers: each is given once, to one process of this machine, and stays its own until that process ends.

That nothing listens on a port now is not enough: a server binds only once it has come up, and one that is started again
had left its port for a while. So who takes a port locks the byte of that number in one file; the kernel lets go of the
locks of a process that ended, however it did.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
import threading
from pathlib import Path

# Below the range from which the kernel picks ports of outgoing connections, so that a stopped broker's stay free.
PORTS = range(20_000, 32_000)

_taking = threading.Lock()
_taken: set[int] = set()
"""By this process, which would get a lock of its own once more."""
_locks: list[int] = []
"""The file's descriptor: closing it would end the locks."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports on which nothing listens, all different."""
    return [consecutive_free_ports(1, host) for _ in range(count)]


def consecutive_free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` neighbouring ports on which nothing listens."""
    with _taking:
        if not _locks:
            name = Path(tempfile.gettempdir(), f"tidegate-ports-{os.getuid()}")
            _locks.append(os.open(name, os.O_RDWR | os.O_CREAT, 0o600))
        while True:
            first = random.choice(PORTS)
            if all(_take(port, host) for port in range(first, first + count)):
                return first


def _take(port: int, host: str) -> bool:
    if port in _taken:
        return False
    try:
        fcntl.lockf(_locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _taken.add(port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
