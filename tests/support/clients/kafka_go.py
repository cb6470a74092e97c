"""The client kafka-go, for reading only. Runs the program in `kafkago/`, which `make test` builds into `.cache/bin`.

The binary is `$TIDEGATE_KAFKAGO`, or `.cache/bin/kafkago` if that is not set.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.clients.client import FETCH_BYTES, ClientRecord, parse_records
from tests.support.clients.program import run
from tests.support.servers.jars import CACHE, ServerUnavailable


class KafkaGo:
    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        return _ask("read", bootstrap, topic, str(offset), str(count), isolation, str(max_bytes))

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        return _ask("read-to", bootstrap, topic, str(offset), str(end), isolation)


def _ask(*args: str) -> list[ClientRecord]:
    path = Path(os.environ.get("TIDEGATE_KAFKAGO") or CACHE / "bin" / "kafkago")
    if not os.access(path, os.X_OK):
        raise ServerUnavailable(f"{path} is missing: run make .cache/bin/kafkago (golang-go installs Go)")
    return parse_records(run([str(path), *args]))
