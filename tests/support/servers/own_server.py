"""A server program with its own process and folder. It answers HTTP on a port that stays the same over a restart."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.pausing import pause_process
from tests.support.servers.ports import free_ports

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0


class OwnServer:
    """A context manager that starts and stops the server. The files in `folder` survive a kill."""

    environment: ClassVar[Mapping[str, str]] = {}
    start_timeout_s: ClassVar[float] = START_TIMEOUT_S

    def __init__(self, program: Path, install: str) -> None:
        if not os.access(program, os.X_OK):
            raise ServerUnavailable(f"{program} is missing: run {install}")
        self._program = program
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-server-"))
        (self.port,) = free_ports(1)
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self._program.name} was not started")
        return self._process.pid

    def arguments(self) -> list[str]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the server has answered a request."""
        command, environment = [str(self._program), *self.arguments()], {**os.environ, **self.environment}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + self.start_timeout_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = (self.folder / "server.log").read_text(errors="replace").strip().splitlines()[-1:]
                self.kill()
                raise ServerUnavailable(f"{self._program.name} did not start: {last[0] if last else 'no output'}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            self.request("GET", "/")  # an error status is an answer too
        except (OSError, http.client.HTTPException):
            return False
        return True

    def request(self, method: str, path: str, body: bytes | None = None) -> int:
        """Sends a request, and returns the HTTP status."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            return connection.getresponse().status
        finally:
            connection.close()

    def kill(self) -> None:
        """Kills the process, as a crash does. `start` starts it again with its objects."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stops the process (SIGSTOP). Its connections stay open. `resume` continues it."""
        if self._process is not None:
            pause_process(self._process.pid)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Ends the process and removes its folder. A second call does nothing."""
        if self._process is not None:
            self.resume()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
