"""The client kafkajs, for reading only. Runs the program in `kafkajs/`.

`make test` installs its packages into `.cache/kafkajs`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.support.clients.client import FETCH_BYTES, ClientRecord, parse_records
from tests.support.clients.program import run
from tests.support.servers.jars import CACHE, ServerUnavailable

_PROGRAM = Path(__file__).parent / "kafkajs" / "main.js"
_MODULES = CACHE / "kafkajs" / "node_modules"


class KafkaJs:
    """Every call uses its own group, since kafkajs reads only in groups."""

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        return _ask("read", bootstrap, topic, str(offset), str(count), isolation, str(max_bytes))

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        return _ask("read-to", bootstrap, topic, str(offset), str(end), isolation, str(FETCH_BYTES))


def _ask(*args: str) -> list[ClientRecord]:
    node = shutil.which("node")
    if node is None or not _MODULES.is_dir():
        raise ServerUnavailable("kafkajs is missing: run make .cache/kafkajs/installed (npm installs it)")
    return parse_records(run([node, str(_PROGRAM), *args], {**os.environ, "NODE_PATH": str(_MODULES)}))
