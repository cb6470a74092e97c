"""The clients franz-go, kafka-go, Sarama and kafkajs. Each call is one process.

Exit code 3: the offset is out of range.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

from tests.support.clients.client import (
    FETCH_BYTES,
    TIMEOUT_S,
    ClientRecord,
    OffsetOutOfRange,
    Offsets,
    parse_offsets,
    parse_records,
)
from tests.support.servers.franz import binary
from tests.support.servers.jars import CACHE, ServerUnavailable

_OUT_OF_RANGE = 3
_PROGRAM = Path(__file__).parent / "kafkajs" / "main.js"
_MODULES = CACHE / "kafkajs" / "node_modules"


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, stdin: bytes = b"") -> bytes:
    """Returns the program's standard output. Raises `OffsetOutOfRange`, or `RuntimeError` with the error output."""
    done = subprocess.run(
        command, env=environment, input=stdin, capture_output=True, timeout=2 * TIMEOUT_S, check=False
    )
    if done.returncode == _OUT_OF_RANGE:
        raise OffsetOutOfRange
    if done.returncode:
        raise RuntimeError(done.stderr.decode().strip())
    return done.stdout


class FranzGo:
    """franz-go. Runs the program in `franz/`."""

    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes]) -> None:
        _franz("produce", bootstrap, topic, stdin=b"\n".join(values))

    def transact(
        self, bootstrap: str, topic: str, values: Sequence[bytes], *, transactional_id: str, commit: bool
    ) -> None:
        _franz("transact", bootstrap, topic, transactional_id, str(commit).lower(), stdin=b"\n".join(values))

    def consume(self, bootstrap: str, topic: str, group: str, count: int, isolation: str) -> list[ClientRecord]:
        return parse_records(_franz("consume", bootstrap, topic, group, str(count), isolation))

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        return parse_records(_franz("read", bootstrap, topic, str(offset), str(count), isolation, str(max_bytes)))

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets:
        return parse_offsets(_franz("offsets", bootstrap, topic, str(timestamp)))


def _franz(*args: str, stdin: bytes = b"") -> bytes:
    return run([str(binary()), *args], stdin=stdin)


class KafkaGo:
    """kafka-go. Runs the program in `kafkago/`, which `make test` builds into `.cache/bin`.

    The binary is `$TIDEGATE_KAFKAGO`, or `.cache/bin/kafkago` if that is not set."""

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        return self._records("read", bootstrap, topic, str(offset), str(count), isolation, str(max_bytes))

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        return self._records("read-to", bootstrap, topic, str(offset), str(end), isolation)

    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes], codec: str) -> None:
        run(self._command("produce", bootstrap, topic, codec), stdin=b"\n".join(values))

    def member(self, bootstrap: str, topic: str, group: str, end: int) -> Member:
        return Member(self._command("member", bootstrap, topic, group, str(end)))

    def _records(self, *args: str) -> list[ClientRecord]:
        return parse_records(run(self._command(*args)))

    @staticmethod
    def _command(*args: str) -> list[str]:
        return [_built("kafkago", "TIDEGATE_KAFKAGO"), *args]


class Sarama:
    """Sarama, with the protocol of one version of Kafka, or with the newest that it knows.

    Runs the program in `sarama/`, which `make test-all` builds into `.cache/bin`. The binary is `$TIDEGATE_SARAMA`, or
    `.cache/bin/sarama` if that is not set."""

    def __init__(self, version: str = "newest") -> None:
        self._version = version

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        arguments = (bootstrap, topic, str(offset), str(count), isolation, str(max_bytes))
        return parse_records(run(self._command("read", *arguments)))

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets:
        return parse_offsets(run(self._command("offsets", bootstrap, topic, str(timestamp))))

    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes], codec: str) -> None:
        run(self._command("produce", bootstrap, topic, codec), stdin=b"\n".join(values))

    def member(self, bootstrap: str, topic: str, group: str, end: int) -> Member:
        return Member(self._command("member", bootstrap, topic, group, str(end)))

    def _command(self, *args: str) -> list[str]:
        return [_built("sarama", "TIDEGATE_SARAMA"), self._version, *args]


def _built(name: str, variable: str) -> str:
    path = Path(os.environ.get(variable) or CACHE / "bin" / name)
    if not os.access(path, os.X_OK):
        raise ServerUnavailable(f"{path} is missing: run make .cache/bin/{name} (golang-go installs Go)")
    return str(path)


class KafkaJs:
    """kafkajs. Runs the program in `kafkajs/`. Every read uses its own group, since kafkajs reads only in groups.

    `make test-all` installs its packages into `.cache/kafkajs`. It does not write lz4 and zstd."""

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        return self._records("read", bootstrap, topic, str(offset), str(count), isolation, str(max_bytes))

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        return self._records("read-to", bootstrap, topic, str(offset), str(end), isolation, str(FETCH_BYTES))

    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes], codec: str) -> None:
        run(self._command("produce", bootstrap, topic, codec), self._environment(), stdin=b"\n".join(values))

    def member(self, bootstrap: str, topic: str, group: str, end: int) -> Member:
        return Member(self._command("member", bootstrap, topic, group, str(end)), self._environment())

    def _records(self, *args: str) -> list[ClientRecord]:
        return parse_records(run(self._command(*args), self._environment()))

    @staticmethod
    def _command(*args: str) -> list[str]:
        node = shutil.which("node")
        if node is None or not _MODULES.is_dir():
            raise ServerUnavailable("kafkajs is missing: run make .cache/kafkajs/installed (npm installs it)")
        return [node, str(_PROGRAM), *args]

    @staticmethod
    def _environment() -> Mapping[str, str]:
        return {**os.environ, "NODE_PATH": str(_MODULES)}


class Member:
    """A member of a group in a process of its own. A context manager that ends the process.

    The member ends by itself when it has read up to its end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._environment = environment
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._said = ""
        self._readers = [Thread(target=self._read_lines), Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.append(line.strip())

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._said = lines.read()

    @property
    def joined(self) -> int:
        """The number of generations of the group that the member has joined."""
        return sum(line.startswith("joined ") for line in self._lines)

    @property
    def offsets(self) -> list[int]:
        """The offsets of the records that the member has read, in the order in which it read them."""
        return [int(line.removeprefix("record ")) for line in self._lines if line.startswith("record ")]

    def wait(self) -> None:
        """Returns when the member has read up to its end. Raises `RuntimeError` with the error output."""
        code = self._process.wait(TIMEOUT_S)
        for reader in self._readers:
            reader.join()
        if code:
            raise RuntimeError(self._said.strip())
