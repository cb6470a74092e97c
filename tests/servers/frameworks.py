"""Kafka Streams, Kafka Connect and MirrorMaker of the Kafka under test: jars of their own, that nothing else needs.

`python -m tests.servers.frameworks` fetches them and says where they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.servers.jars import ServerUnavailable, jars, java
from tests.servers.kafka import KAFKA_VERSION

_POM = Path(__file__).with_name("frameworks.xml")


def framework_libs() -> Path:
    """The folder of the frameworks' own jars, fetched at the first use; what they need is among the broker's."""
    return jars(_POM, f"kafka-{KAFKA_VERSION}/frameworks", {"kafka.version": KAFKA_VERSION})


if __name__ == "__main__":
    try:
        java()
        print(framework_libs())
    except ServerUnavailable as missing:
        sys.exit(str(missing))
