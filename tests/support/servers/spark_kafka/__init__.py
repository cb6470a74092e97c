"""Spark's own Kafka source, for a benchmark: its jars, by Maven, and beside them the little that no jar gives here.

Its version is the pom's, which is the newest that is published; `pyspark` may be newer and runs it all the same.
"""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pyspark

from tests.support.servers.jars import CACHE, ServerUnavailable, jars, java, pom_property

_HERE = Path(__file__).parent
_POM = _HERE / "pom.xml"
VERSION = pom_property(_POM, "spark.version")
CLIENTS_VERSION = pom_property(_POM, "kafka-clients.version")


def spark_kafka_class_path() -> str:
    """For `spark.driver.extraClassPath`, fetched and compiled at the first use. Raises `ServerUnavailable`."""
    libs = jars(_POM, f"spark-kafka-{VERSION}")
    return f"{_stand_ins()}:{libs}/*"


def _stand_ins() -> Path:
    classes = CACHE / f"spark-kafka-{VERSION}" / "classes"
    javac = Path(java()).with_name("javac")
    with (classes.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        class_path = f"{Path(pyspark.__file__).parent}/jars/*"
        command = [str(javac), "-nowarn", "-cp", class_path, "-d", str(classes), *map(str, _HERE.glob("*.java"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServerUnavailable(f"a JDK is needed, not only Java: {done.stderr.strip()[:300]}")
    return classes
