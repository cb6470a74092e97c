"""Assigns ports to servers. Each port belongs to one process of this machine until that process ends.

It is not enough that nothing listens on a port now: a server binds its port late in its start, and a server that
restarts leaves its port for a while. Therefore a process that takes a port locks the byte with that number in one file.
The kernel releases the locks of a process when it ends, however it ended.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import threading
from pathlib import Path

# The range is below the kernel's range for outgoing connections, so the ports of a stopped broker stay free.
PORTS = range(20_000, 32_000)

_taking = threading.Lock()
_taken: set[int] = set()
"""The ports of this process. The kernel would grant the same lock to this process again."""
_locks: list[int] = []
"""The descriptor of the file. Closing it would release the locks."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns `count` different ports on which nothing listens."""
    return [consecutive_free_ports(1, host) for _ in range(count)]


def consecutive_free_ports(count: int, host: str = "127.0.0.1") -> int:
    """Returns the first of `count` consecutive ports on which nothing listens."""
    with _taking:
        if not _locks:
            # Runs with different values of TMPDIR share the ports of the machine, so they share this file.
            name = Path("/tmp", f"tidegate-ports-{os.getuid()}")
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
