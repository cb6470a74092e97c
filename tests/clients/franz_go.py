"""franz-go, by the program in `franz/`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tests.clients.client import (
    FETCH_BYTES,
    TIMEOUT_S,
    ClientRecord,
    OffsetOutOfRange,
    Offsets,
    parse_offsets,
    parse_records,
)
from tests.servers.franz import binary

_OUT_OF_RANGE = 3


class FranzGo:
    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes]) -> None:
        _run("produce", bootstrap, topic, stdin=b"\n".join(values))

    def transact(
        self, bootstrap: str, topic: str, values: Sequence[bytes], *, transactional_id: str, commit: bool
    ) -> None:
        _run("transact", bootstrap, topic, transactional_id, str(commit).lower(), stdin=b"\n".join(values))

    def consume(self, bootstrap: str, topic: str, group: str, count: int, isolation: str) -> list[ClientRecord]:
        return parse_records(_run("consume", bootstrap, topic, group, str(count), isolation))

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        return parse_records(_run("read", bootstrap, topic, str(offset), str(count), isolation, str(max_bytes)))

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets:
        return parse_offsets(_run("offsets", bootstrap, topic, str(timestamp)))


def _run(*args: str, stdin: bytes = b"") -> bytes:
    command = [str(binary()), *args]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=2 * TIMEOUT_S, check=False)
    if done.returncode == _OUT_OF_RANGE:
        raise OffsetOutOfRange
    if done.returncode:
        raise RuntimeError(done.stderr.decode().strip())
    return done.stdout
