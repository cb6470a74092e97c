"""A worker of Kafka Connect in distributed mode: a process with its own folder. Tests use its REST API."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.servers.frameworks import framework_libs
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import SHORT_LIVED, java_command
from tests.support.servers.ports import free_ports

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 300.0


class ConnectWorker:
    """A context manager. `name` is the name of the worker's group and the prefix of its three topics' names."""

    def __init__(self, bootstrap_servers: str, name: str, settings: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-connect-"))
        self.output = self.folder / "connect.out"
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        self._properties = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": name,
            "listeners": self._url,
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "plugin.discovery": "service_load",
            "offset.storage.partitions": "1",
            "status.storage.partitions": "1",
            "offset.flush.interval.ms": "500",
            "scheduled.rebalance.max.delay.ms": "0",
        }
        for kind in ("config", "offset", "status"):
            self._properties[f"{kind}.storage.topic"] = f"{name}-{kind}"
            self._properties[f"{kind}.storage.replication.factor"] = "1"
        self._properties.update(settings or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Returns when the worker has joined its group. It accepts no connectors before that."""
        properties = self.folder / "worker.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in self._properties.items()))
        command = java_command("org.apache.kafka.connect.cli.ConnectDistributed", heap_mib=256, options=SHORT_LIVED)
        command[command.index("-cp") + 1] += f"{os.pathsep}{framework_libs()}/*"
        atexit.register(self.stop)
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, str(properties)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ServerUnavailable(f"Kafka Connect did not start: see {self.output}")
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            return bool(self.ask("GET", "/health")["status"] == "healthy")
        except OSError:
            return False

    def ask(self, method: str, path: str, body: Mapping[str, str] | None = None) -> Any:
        """Returns the JSON of the answer. None: the answer has no body. Raises `urllib.error.HTTPError`."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def states(self, connector: str) -> list[str]:
        """Returns the states of the connector and its tasks. Empty while the worker does not know the connector."""
        try:
            status = self.ask("GET", f"/connectors/{connector}/status")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return []
            raise
        return [status["connector"]["state"], *(task["state"] for task in status["tasks"])]

    def stop(self) -> None:
        """Stops the worker. A second call does nothing."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_TIMEOUT_S)
