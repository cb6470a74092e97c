"""`PortClaims`: the ports that the workers of one proxy share, so that no worker shares one with a stranger.

Workers share their ports by SO_REUSEPORT. The kernel then also lets another program of the same user bind them, and
gives it a part of the connections: a second Tidegate with overlapping ports, for example. So the first worker that
opens a port tries to bind it alone before. The claims are in a file without a name, which the supervisor makes and the
workers inherit. They end with the supervisor.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket
from typing import IO

from proxy.wire.server import bind

_PORTS = 65_536
_CLAIMED = b"\x01"


def make_claims() -> IO[bytes]:
    """Returns the file of a new proxy, which claims no port."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller owns it
    file.truncate(_PORTS)
    return file


class PortClaims:
    """The view of one worker. `fd` is the file from `make_claims`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def open(self, host: str, port: int) -> socket:
        """Returns a listener that the workers share. Raises `OSError`, also if a stranger shares its port."""
        with self._locked():
            if os.pread(self._fd, 1, port) != _CLAIMED:
                bind(host, port, reuse_port=False, listens=False).close()
            listener = bind(host, port, reuse_port=True)
            os.pwrite(self._fd, _CLAIMED, port)
        return listener

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps the other workers out. The lock belongs to the process, and ends with it."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
