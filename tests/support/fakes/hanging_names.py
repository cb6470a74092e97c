"""A name service in which the names of one domain hang."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

HANGING = "hangs.example"
"""The domain of the names that hang."""
KNOWN = "known.example"
"""A name of this machine."""


class HangingNames:
    def __init__(self) -> None:
        self.look_ups: Counter[str] = Counter()
        self._hanging = threading.Semaphore(0)
        self._end = threading.Event()
        self._real = socket.getaddrinfo

    async def hang(self, look_ups: int) -> None:
        """Waits until so many more look-ups hang."""
        for _ in range(look_ups):
            assert await asyncio.to_thread(self._hanging.acquire, timeout=60)

    def getaddrinfo(self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return self._real(host, port, family, type, proto, flags)
        self.look_ups[host] += 1
        if str(host).endswith(HANGING):
            self._hanging.release()
            self._end.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "the look-up hung")
        return self._real("127.0.0.1" if host == KNOWN else host, port, family, type, proto, flags)

    def end(self) -> None:
        self._end.set()


@contextmanager
def hanging_names() -> Iterator[HangingNames]:
    """Replaces the name service of this process. The look-ups that hang fail at the end."""
    names = HangingNames()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", names.getaddrinfo)
        try:
            yield names
        finally:
            names.end()
