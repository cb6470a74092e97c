"""`PortClaims`: the ports that the workers of one proxy share, so that no worker shares one with a stranger.

Workers share their ports by SO_REUSEPORT. The kernel then also lets another program of the same user bind them, and
gives it a part of the connections: a second Tidegate with overlapping ports, for example. So the first worker that
opens a port tries to bind it alone before. The claims are in a file without a name, which the supervisor makes and the
workers inherit. They end with the supervisor.

A claim also names the listener. If the ports of two listeners overlap, the first one has the port in all workers.
Otherwise each worker would decide by the order in which it met the brokers, and a client would reach one of two.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket
from typing import IO

from proxy.wire.server import bind


def make_claims() -> IO[bytes]:
    """Returns the file of a new proxy, which claims no port."""
    return tempfile.TemporaryFile()


class PortClaims:
    """The view of one worker. `fd` is the file from `make_claims`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def open(self, listener: str, host: str, port: int) -> socket:
        """Returns a socket that the workers share, for the listener of that name.

        Raises `OSError`, also if a stranger or another listener has the port."""
        with self._locked():
            size_bytes = os.fstat(self._fd).st_size
            claims = map(json.loads, os.pread(self._fd, size_bytes, 0).splitlines())
            owner = next((name for name, *place in claims if place == [host, port]), None)
            if owner is None:
                bind(host, port, reuse_port=False, listens=False).close()
            elif owner != listener:
                raise OSError(errno.EADDRINUSE, f"{host}:{port}: the listener {owner} of this proxy has this port")
            bound = bind(host, port, reuse_port=True)
            if owner is None:
                os.pwrite(self._fd, json.dumps([listener, host, port]).encode() + b"\n", size_bytes)
        return bound

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps the other workers out. The lock belongs to the process, and ends with it."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
