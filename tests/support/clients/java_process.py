"""A Java program of the tests, compiled once against Kafka's jars. One process serves many calls.

A call is a line on the program's standard input. The answer is all lines up to `OK`, or one line with the error.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.support.clients.client import TIMEOUT_S, OffsetOutOfRange
from tests.support.servers.jars import ServerUnavailable, java
from tests.support.servers.kafka import SHORT_LIVED, java_command, kafka_libs

_SOURCES = Path(__file__).parent / "java"


class JavaProcess:
    """`main` is a class of `java/`, in the file with the same name. `libs` are more folders of jars.

    The process ends with `stop()`, at the latest when Python exits."""

    def __init__(
        self, main: str, *, libs: Sequence[Path] = (), options: Sequence[str] = (), heap_mib: int = 256
    ) -> None:
        jars = [f"{folder}/*" for folder in (kafka_libs(), *libs)]
        classes = compiled(_SOURCES / f"{main}.java", os.pathsep.join(jars), kafka_libs().parent)
        options = [*SHORT_LIVED, *options]
        command = java_command(main, heap_mib=heap_mib, options=options, log_level="ERROR")
        command[command.index("-cp") + 1] = os.pathsep.join([*jars, str(classes)])
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._lock = threading.Lock()
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: str) -> bytes:
        """Returns the lines of the answer. Raises `OffsetOutOfRange`, or `RuntimeError` with the program's output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer: list[bytes] = []
        with self._lock:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
            while (got := self._process.stdout.readline()) != b"OK\n":
                if got == b"OFFSET_OUT_OF_RANGE\n":
                    raise OffsetOutOfRange
                if not got or got.startswith(b"ERROR"):
                    raise RuntimeError(f"the Java program: {got.decode() or 'its process ended'}")
                answer.append(got)
        return b"".join(answer)

    def stop(self) -> None:
        """Ends the process. A second call does nothing."""
        atexit.unregister(self.stop)
        self._process.kill()
        self._process.communicate()


def compiled(source: Path, classpath: str, home: Path) -> Path:
    """Returns a folder in `home` with the compiled class. Its name has the hash of the source, so it is never stale."""
    folder = home / f"classes-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    compiler = Path(java()).with_name("javac")
    found = compiler if compiler.is_file() else shutil.which("javac")
    if found is None:
        raise ServerUnavailable("javac is missing: install a JDK, not only a runtime (openjdk-17-jdk-headless).")
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        partial = home / "classes.partial"
        shutil.rmtree(partial, ignore_errors=True)
        command = [str(found), "-cp", classpath, "-proc:none", "-d", str(partial), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        partial.rename(folder)
    return folder
