"""Spark's own cluster on this machine: a master, and workers on loopback addresses."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from tests.servers.jars import ServerUnavailable
from tests.servers.own_server import OwnServer
from tests.servers.ports import free_ports

SPARK_HOME = Path(pyspark.__file__).parent
SPARK_SUBMIT = SPARK_HOME / "bin" / "spark-submit"
_INSTALL = "make .venv/installed"
QUICK_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Options of a JVM that lives for a minute: the second compiler gains it nothing."""


def unpacked_spark(folder: Path) -> Path:
    """A home of Spark for `SPARK_HOME`, whose Python processes import the installed pyspark, compiled, in place of the
    one in Spark's zip: of that every process compiles all anew, for two seconds of a processor's, and Spark gives the
    one of a stream's source ten to start in, whatever else the machine has to do."""
    for part in SPARK_HOME.iterdir():
        if part.name != "python":
            (folder / part.name).symlink_to(part)
    return folder


def _small(host: str = "127.0.0.1") -> dict[str, str]:
    return {
        "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": host,
    }


class SparkMaster(OwnServer):
    """`url` is what `--master` takes."""

    start_timeout_s = 180.0

    def __init__(self) -> None:
        super().__init__(SPARK_HOME / "bin" / "spark-class", _INSTALL)
        self.environment = _small()  # type: ignore[misc]  # of one
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
        """0 while the master is too busy to say."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.endpoint_url}/json/", timeout=10) as answer,
        ):
            return int(json.load(answer)["aliveworkers"])
        return 0


class SparkWorker(OwnServer):
    """One core, on a loopback address of its own if wanted: Spark takes addresses for machines."""

    start_timeout_s = 180.0

    def __init__(self, master: SparkMaster, host: str = "127.0.0.1", environment: dict[str, str] | None = None) -> None:
        super().__init__(SPARK_HOME / "bin" / "spark-class", _INSTALL)
        self._master = master
        self._host = host
        # Executors inherit it.
        self.environment = {**_small(host), **(environment or {})}  # type: ignore[misc]  # of one

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self._host, self.port), timeout=10):
            return True
        return False

    def arguments(self) -> list[str]:
        listening = ["--host", self._host, "--webui-port", str(self.port), "--work-dir", os.fspath(self.folder)]
        size = ["--cores", "1", "--memory", "1g"]
        return ["org.apache.spark.deploy.worker.Worker", *listening, *size, self._master.url]


@contextmanager
def spark_workers(master: SparkMaster, hosts: Sequence[str], environment: dict[str, str]) -> Iterator[None]:
    """One on each, all at once, and known to the master."""
    workers = [SparkWorker(master, host, environment) for host in hosts]
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        for worker in workers:
            stack.callback(worker.stop)
        for _ in threads.map(SparkWorker.start, workers):
            pass
        master.wait_for_workers(len(workers))
        yield
