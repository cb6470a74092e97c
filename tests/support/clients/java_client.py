"""The Java client of the Kafka under test. Runs `MatrixClient.java`, compiled once against Kafka's jars.

One Java process serves all calls of this process, and ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tests.support.clients.client import (
    CLASSIC,
    FETCH_BYTES,
    ClientRecord,
    Offsets,
    parse_offsets,
    parse_records,
)
from tests.support.clients.java_process import JavaProcess


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

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        return parse_records(_ask("read", bootstrap, topic, str(offset), str(count), isolation, str(max_bytes)))

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        return parse_records(_ask("read-to", bootstrap, topic, str(offset), str(end), isolation))

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets:
        return parse_offsets(_ask("offsets", bootstrap, topic, str(timestamp)))


_starting = threading.Lock()
_running: list[JavaProcess] = []


def _ask(*args: str) -> bytes:
    with _starting:
        if not _running:
            _running.append(JavaProcess("MatrixClient"))
    return _running[0].ask(" ".join(args))
