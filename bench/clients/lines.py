"""A client of the benchmark in a process of its own. It writes lines, which a thread collects."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 90.0


class LineProcess:
    """A context manager. Runs `python -m module arguments` until it is stopped.

    The process writes a line of numbers for everything that it measures, and ends when its standard input closes. So
    it never outlives this process. `time.monotonic()` has the same zero in all processes of a machine."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._lines: list[tuple[float, ...]] = []
        self._said = threading.Condition()
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the client was not started")
        return self._process.pid

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        atexit.register(self.stop)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            numbers = tuple(map(float, line.split()))
            with self._said:
                self._lines.append(numbers)
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def wait_for_lines(self, count: int = 1, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when the process has written that many lines since the last `take`."""
        deadline = time.monotonic() + timeout_s
        with self._said:
            while len(self._lines) < count:
                if not self._reader.is_alive() or not self._said.wait(deadline - time.monotonic()):
                    break
            else:
                return
        raise RuntimeError(f"{self._command[2]} measured nothing: {self.stop() or 'it wrote no error'}")

    def take(self) -> list[tuple[float, ...]]:
        """Removes and returns the lines so far. Raises RuntimeError if the process has ended."""
        with self._said:
            taken, self._lines = self._lines, []
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"{self._command[2]} ended: {self.stop()}")
        return taken

    def stop(self) -> str:
        """Ends the process, and returns the end of its error output. A second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return ""
        atexit.unregister(self.stop)
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()
        assert process.stdout is not None
        process.stdout.close()
        with process.stderr as errors:
            return errors.read()[-2000:].strip()


def exit_when_stdin_closes() -> None:
    """Ends this process when its standard input closes: its parent is gone or wants no more.

    It leaves nothing behind that had to be closed, and many such processes end faster so."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
