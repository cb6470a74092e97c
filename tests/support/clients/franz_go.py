"""The client franz-go. Runs the program in `franz/`."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.clients.client import FETCH_BYTES, ClientRecord, Offsets, parse_offsets, parse_records
from tests.support.clients.program import run
from tests.support.servers.franz import binary


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
    return run([str(binary()), *args], stdin=stdin)
