"""A standalone Spark cluster on this machine: a master, and workers on loopback addresses."""

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

from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.own_server import OwnServer
from tests.support.servers.ports import free_ports

SPARK_HOME = Path(pyspark.__file__).parent
SPARK_SUBMIT = SPARK_HOME / "bin" / "spark-submit"
_INSTALL = "make .venv/installed"
QUICK_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Options for a JVM that lives for a minute, too short a time for the second compiler to pay off."""


def unpacked_spark(folder: Path) -> Path:
    """Returns a home for `SPARK_HOME` whose Python processes import the installed pyspark, which is compiled.

    By default they import pyspark from Spark's zip. Each process then compiles all of it, which takes two seconds of
    processor time. Spark gives the process of a stream's source only ten seconds to start, even on a busy machine."""
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
    """A Spark master. `url` is the value for `--master`."""

    start_timeout_s = 180.0

    def __init__(self) -> None:
        super().__init__(SPARK_HOME / "bin" / "spark-class", _INSTALL)
        self.environment = _small()  # type: ignore[misc]  # set per instance
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
        """Returns the number of known workers, or 0 while the master is too busy to answer."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.endpoint_url}/json/", timeout=10) as answer,
        ):
            return int(json.load(answer)["aliveworkers"])
        return 0


class SparkWorker(OwnServer):
    """A worker with one core. `host` may be its own loopback address: Spark treats each address as a machine."""

    start_timeout_s = 180.0

    def __init__(self, master: SparkMaster, host: str = "127.0.0.1", environment: dict[str, str] | None = None) -> None:
        super().__init__(SPARK_HOME / "bin" / "spark-class", _INSTALL)
        self._master = master
        self._host = host
        # The executors inherit this environment.
        self.environment = {**_small(host), **(environment or {})}  # type: ignore[misc]  # set per instance

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
    """Starts one worker on each host, all at the same time. Waits until the master knows them."""
    workers = [SparkWorker(master, host, environment) for host in hosts]
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        for worker in workers:
            stack.callback(worker.stop)
        for _ in threads.map(SparkWorker.start, workers):
            pass
        master.wait_for_workers(len(workers))
        yield
