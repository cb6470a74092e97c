"""An address that answers no SYN, as that of a machine without power. A connect to it neither succeeds nor fails."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def blackhole() -> Iterator[tuple[str, int]]:
    """Yields the address. It belongs to a listener whose backlog is full, so the kernel drops each further SYN."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address: tuple[str, int] = listener.getsockname()
        with socket.create_connection(address):
            yield address
