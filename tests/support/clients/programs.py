"""The clients franz-go, kafka-go and kafkajs. Each call is one process. Exit code 3: the offset is out of range."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    """kafka-go, for reading only. Runs the program in `kafkago/`, which `make test` builds into `.cache/bin`.

    The binary is `$TIDEGATE_KAFKAGO`, or `.cache/bin/kafkago` if that is not set."""

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        return _kafkago("read", bootstrap, topic, str(offset), str(count), isolation, str(max_bytes))

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        return _kafkago("read-to", bootstrap, topic, str(offset), str(end), isolation)


def _kafkago(*args: str) -> list[ClientRecord]:
    path = Path(os.environ.get("TIDEGATE_KAFKAGO") or CACHE / "bin" / "kafkago")
    if not os.access(path, os.X_OK):
        raise ServerUnavailable(f"{path} is missing: run make .cache/bin/kafkago (golang-go installs Go)")
    return parse_records(run([str(path), *args]))


class KafkaJs:
    """kafkajs, for reading only. Runs the program in `kafkajs/`. Every call uses its own group, since kafkajs reads
    only in groups. `make test-all` installs its packages into `.cache/kafkajs`."""

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        return _kafkajs("read", bootstrap, topic, str(offset), str(count), isolation, str(max_bytes))

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        return _kafkajs("read-to", bootstrap, topic, str(offset), str(end), isolation, str(FETCH_BYTES))


def _kafkajs(*args: str) -> list[ClientRecord]:
    node = shutil.which("node")
    if node is None or not _MODULES.is_dir():
        raise ServerUnavailable("kafkajs is missing: run make .cache/kafkajs/installed (npm installs it)")
    return parse_records(run([node, str(_PROGRAM), *args], {**os.environ, "NODE_PATH": str(_MODULES)}))
