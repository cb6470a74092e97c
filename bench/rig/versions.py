"""The versions of the programs that a run measured."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import confluent_kafka
import kafka

from tests.support.servers import versitygw
from tests.support.servers.jars import java
from tests.support.servers.kafka import KAFKA_VERSION


def versions() -> dict[str, str]:
    """Returns the versions by name. A program that is not installed is missing."""
    found = {
        "Python": sys.version.split()[0],
        "Kafka": KAFKA_VERSION,
        "Java": _first(r'version "([^"]+)"', [java(), "-version"]),
        "librdkafka": confluent_kafka.libversion()[0],
        "kafka-python": kafka.__version__,
        "versitygw": versitygw.VERSION.removeprefix("v"),
    }
    if haproxy := shutil.which("haproxy"):
        found["haproxy"] = _first(r"version (\d[\d.]*)", [haproxy, "-v"])
    return {name: version for name, version in found.items() if version}


def _first(pattern: str, command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(pattern, done.stdout + done.stderr)
    return found[1] if found else ""
