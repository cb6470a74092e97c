"""The Java client of the Kafka under test: `MatrixClient.java`, compiled once against its jars.

One Java process serves all calls of this process and ends with it.
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

from tests.clients.client import (
    CLASSIC,
    TIMEOUT_S,
    ClientRecord,
    OffsetOutOfRange,
    Offsets,
    parse_offsets,
    parse_records,
)
from tests.servers.jars import ServerUnavailable, java
from tests.servers.kafka import java_command, kafka_libs

SOURCE = Path(__file__).parent / "java" / "MatrixClient.java"


class JavaClient:
    def __init__(self, group_protocol: str = CLASSIC) -> None:
        self._group_protocol = group_protocol

    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes]) -> None:
        _ask("produce", bootstrap, topic, *(each.hex() for each in values))

    def transact(
        self, bootstrap: str, topic: str, values: Sequence[bytes], *, transactional_id: str, commit: bool
    ) -> None:
        _ask("transact", bootstrap, topic, transactional_id, str(commit), *(each.hex() for each in values))

    def consume(self, bootstrap: str, topic: str, group: str, count: int, isolation: str) -> list[ClientRecord]:
        return parse_records(_ask("consume", bootstrap, topic, group, str(count), isolation, self._group_protocol))

    def read(self, bootstrap: str, topic: str, offset: int, count: int, isolation: str) -> list[ClientRecord]:
        return parse_records(_ask("read", bootstrap, topic, str(offset), str(count), isolation))

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets:
        return parse_offsets(_ask("offsets", bootstrap, topic, str(timestamp)))


def _classes() -> Path:
    """The folder of the compiled class, by the source's own hash: never stale."""
    home = kafka_libs().parent
    folder = home / f"classes-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
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
        command = [str(found), "-cp", f"{kafka_libs()}/*", "-proc:none", "-d", str(partial), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        partial.rename(folder)
    return folder


class _Process:
    def __init__(self) -> None:
        command = java_command("MatrixClient", heap_mib=256, options=["-XX:TieredStopAtLevel=1"], log_level="ERROR")
        command[command.index("-cp") + 1] += f"{os.pathsep}{_classes()}"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._lock = threading.Lock()
        atexit.register(self._end)

    def ask(self, line: str) -> bytes:
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
                    raise RuntimeError(f"the Java client: {got.decode() or 'its process ended'}")
                answer.append(got)
        return b"".join(answer)

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


_starting = threading.Lock()
_running: list[_Process] = []


def _ask(*args: str) -> bytes:
    with _starting:
        if not _running:
            _running.append(_Process())
    return _running[0].ask(" ".join(args))
