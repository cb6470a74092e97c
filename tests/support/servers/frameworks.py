"""The jars of Kafka Streams, Kafka Connect and MirrorMaker, in the version of the Kafka under test.

`python -m tests.support.servers.frameworks` fetches the jars and prints their folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.servers.jars import ServerUnavailable, jars, java
from tests.support.servers.kafka import KAFKA_VERSION

_POM = Path(__file__).with_name("frameworks.xml")


def framework_libs() -> Path:
    """Returns the folder of the frameworks' own jars. The first use fetches them.

    Their dependencies are in the broker's folder."""
    return jars(_POM, f"kafka-{KAFKA_VERSION}/frameworks", {"kafka.version": KAFKA_VERSION})


if __name__ == "__main__":
    try:
        java()
        print(framework_libs())
    except ServerUnavailable as missing:
        sys.exit(str(missing))
