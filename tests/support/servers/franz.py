"""franz-go as a client: runs the program in `tests/support/clients/franz`. `make test` builds it into `.cache/bin`.

The binary is `$TIDEGATE_FRANZ`, or `.cache/bin/franz` if that is not set.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.servers.jars import CACHE, ROOT, ServerUnavailable

TIMEOUT_S = 300.0


class FranzRecord(NamedTuple):
    topic: str
    partition: int
    offset: int
    value: bytes


def binary() -> Path:
    path = Path(os.environ.get("TIDEGATE_FRANZ") or CACHE / "bin" / "franz")
    if not os.access(path, os.X_OK):
        raise ServerUnavailable(
            f"{path} is missing: run go build -o {path} . in {ROOT / 'tests' / 'clients' / 'franz'} "
            "(golang-go installs Go)"
        )
    return path


def read_with_franz(bootstrap: str, topics: Sequence[str], count: int) -> list[FranzRecord]:
    """Returns the first `count` records, in the order of each partition. Values must not contain spaces."""
    command = [str(binary()), "topics", bootstrap, ",".join(topics), str(count)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.decode().strip())
    return list(_records(done.stdout))


def _records(output: bytes) -> Iterator[FranzRecord]:
    for line in output.splitlines():
        topic, partition, offset, value = line.split(b" ")
        yield FranzRecord(topic.decode(), int(partition), int(offset), value)
