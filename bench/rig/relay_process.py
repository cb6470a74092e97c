"""A relay that runs as a process of its own. It is ready when it accepts connections."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.servers.jars import ServerUnavailable

START_TIMEOUT_S = 90.0


class RelayProcess:
    """A context manager. `folder` is removed with the process. `ports` are those at which the process listens."""

    def __init__(self, name: str, ports: Sequence[int]) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-relay-"))
        self._ports = ports
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    def __enter__(self) -> Self:
        atexit.register(self.stop)
        output = self.folder / "output"
        with output.open("wb") as out:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        for port in self._ports:
            while not _listens(port):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = output.read_text(errors="replace").strip()[-500:]
                    self.stop()
                    raise ServerUnavailable(f"{self.name} did not start: {said}")
                time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Kills the process and its children. A second call does nothing."""
        atexit.unregister(self.stop)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
