"""Spark's own cluster on this machine: a master, and workers on loopback addresses."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import urllib.request
from pathlib import Path

import pyspark

from tests.servers.jars import ServerUnavailable
from tests.servers.kafka import free_ports
from tests.servers.own_server import OwnServer

SPARK_HOME = Path(pyspark.__file__).parent
SPARK_SUBMIT = SPARK_HOME / "bin" / "spark-submit"
_INSTALL = "make .venv/installed"
QUICK_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""A JVM that lives for a minute gains nothing from the second compiler."""
_SMALL = {
    "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
    "SPARK_DAEMON_MEMORY": "256m",
    "SPARK_HOME": str(SPARK_HOME),
    "SPARK_LOCAL_IP": "127.0.0.1",
}


class SparkMaster(OwnServer):
    """`url` is what `--master` takes."""

    environment = _SMALL
    start_timeout_s = 180.0

    def __init__(self) -> None:
        super().__init__(SPARK_HOME / "bin" / "spark-class", _INSTALL)
        (port,) = free_ports(1)
        self._cluster_port = port
        self.url = f"spark://127.0.0.1:{port}"

    def arguments(self) -> list[str]:
        addresses = ["--host", "127.0.0.1", "--port", str(self._cluster_port), "--webui-port", str(self.port)]
        return ["org.apache.spark.deploy.master.Master", *addresses]

    def wait_for_workers(self, count: int) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while self._workers() < count:
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"not all of {count} Spark workers came up")
            time.sleep(0.1)

    def _workers(self) -> int:
        with urllib.request.urlopen(f"{self.endpoint_url}/json/", timeout=10) as answer:
            return int(json.load(answer)["aliveworkers"])


class SparkWorker(OwnServer):
    """One core, on a loopback address of its own if wanted: Spark takes addresses for machines."""

    start_timeout_s = 180.0

    def __init__(self, master: SparkMaster, host: str = "127.0.0.1", environment: dict[str, str] | None = None) -> None:
        super().__init__(SPARK_HOME / "bin" / "spark-class", _INSTALL)
        self._master = master
        self._host = host
        # Executors inherit it.
        self.environment = {**_SMALL, "SPARK_LOCAL_IP": host, **(environment or {})}  # type: ignore[misc]  # of one

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self._host, self.port), timeout=10):
            return True
        return False

    def arguments(self) -> list[str]:
        listening = ["--host", self._host, "--webui-port", str(self.port), "--work-dir", os.fspath(self.folder)]
        size = ["--cores", "1", "--memory", "1g"]
        return ["org.apache.spark.deploy.worker.Worker", *listening, *size, self._master.url]
