"""A `BlockingFileSystem` over a folder that hangs on request, for the child process of `ChildCalls`.

A read of `frozen` holds the interpreter's lock forever. A read of `stuck` only waits. A read of `forbidden` is always
refused. A read of `dies` ends the process. Every read is refused while the file `accepted` has other bytes than the
file `ticket` had when the process connected. A write waits before each piece while a file `hold` exists, and a quarter
of a second while a file `slow` exists.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tiers.errors import CredentialsRefusedError
from tiers.storage.file_system import ThreadCalls
from tiers.storage.local import LocalFiles


def make(settings: Mapping[str, str]) -> ThreadCalls:
    values = {"cluster.id": "cluster-1", "threads": "4", "timeout.ms": settings["timeout.ms"]}
    return ThreadCalls(StallingFiles(Path(settings["path"])), values)


class StallingFiles(LocalFiles):
    shows_on_close = True
    moves_once = False

    def connect(self) -> None:
        super().connect()
        self._ticket = self._content_of("ticket")

    def _content_of(self, name: str) -> bytes:
        file = Path(self.name) / name
        return file.read_bytes() if file.exists() else b""

    def write(self, path: str, size_bytes: int, pieces: Iterator[bytes]) -> None:
        super().write(path, size_bytes, self._slowly(pieces))

    def _slowly(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            if (Path(self.name) / "slow").exists():
                time.sleep(0.25)
            while (Path(self.name) / "hold").exists():
                time.sleep(0.001)

    def read(self, path: str, start: int, end: int | None) -> memoryview:
        if self._ticket != self._content_of("accepted"):
            raise CredentialsRefusedError("the ticket has ended")
        match path.rpartition("/")[2]:
            case "frozen":
                ctypes.PyDLL(None).sleep(3600)
            case "stuck":
                threading.Event().wait()
            case "forbidden":
                raise CredentialsRefusedError("there is no right to read it")
            case "dies":
                os._exit(3)
        return super().read(path, start, end)
