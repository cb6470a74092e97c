"""Real servers of what `pyarrow.fs` reaches: Azurite for Azure Blob Storage, fake-gcs-server for Google Cloud Storage.

Azurite checks credentials; fake-gcs-server checks none. Both keep their objects in a folder of their own. Ports stay
the same over a restart. Azurite is `$TIDEGATE_AZURITE`, else in `.cache/azurite`; fake-gcs-server is
`$TIDEGATE_FAKE_GCS`, else `.cache/bin/fake-gcs-server`.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from tests.servers.jars import CACHE, ServerUnavailable
from tests.servers.kafka import free_ports

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
FAKE_GCS_VERSION = "v1.56.1"
ACCOUNT_NAME = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which every installation of it knows."""


class _ObjectStore:
    """One server; `with` starts and stops it."""

    install: ClassVar[str]

    def __init__(self, program: Path) -> None:
        if not os.access(program, os.X_OK):
            raise ServerUnavailable(f"{program} is missing: run {self.install}")
        self._program = program
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-objects-"))
        (self.port,) = free_ports(1)
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)

    def arguments(self) -> list[str]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the server has answered a request."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._program), *self.arguments()], stdout=log, stderr=log, cwd=self.folder
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = (self.folder / "server.log").read_text(errors="replace").strip().splitlines()[-1:]
                self.stop()
                raise ServerUnavailable(f"{self._program.name} did not start: {last[0] if last else 'no output'}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            self._request("GET", "/")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _request(self, method: str, path: str, body: bytes | None = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            return connection.getresponse().status
        finally:
            connection.close()

    def stop(self) -> None:
        """Ends the process and removes its folder; safe to call twice."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)


class Azurite(_ObjectStore):
    install = "make .cache/azurite/installed"

    def __init__(self) -> None:
        super().__init__(
            Path(os.environ.get("TIDEGATE_AZURITE") or CACHE / "azurite" / "node_modules" / ".bin" / "azurite-blob")
        )
        self._containers: set[str] = set()

    def arguments(self) -> list[str]:
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self.folder / "data")]
        # The version of Azure's interface that pyarrow asks for is newer than the newest that Azurite names.
        return [*place, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]

    def create_container(self, name: str) -> None:
        """Once per name."""
        if name in self._containers:
            return
        from pyarrow import fs  # half a second, which other tests need not wait for

        address = f"127.0.0.1:{self.port}"
        files = fs.AzureFileSystem(
            ACCOUNT_NAME,
            account_key=ACCOUNT_KEY,
            blob_storage_authority=address,
            dfs_storage_authority=address,
            blob_storage_scheme="http",
            dfs_storage_scheme="http",
        )
        files.create_dir(name)
        self._containers.add(name)

    def settings(self, container: str, prefix: str) -> dict[str, str]:
        """What `ArrowRemoteStorageManager` needs to use this server."""
        return {
            "uri": f"az://{container}/{prefix}",
            "endpoint.url": self.endpoint_url,
            "account.name": ACCOUNT_NAME,
            "account.key": ACCOUNT_KEY,
        }


class FakeGcs(_ObjectStore):
    install = f"GOBIN={CACHE / 'bin'} go install github.com/fsouza/fake-gcs-server@{FAKE_GCS_VERSION}"

    def __init__(self) -> None:
        super().__init__(Path(os.environ.get("TIDEGATE_FAKE_GCS") or CACHE / "bin" / "fake-gcs-server"))

    def arguments(self) -> list[str]:
        place = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        # It names itself in the addresses of uploads, and cannot serve a public host other than its own.
        return [*place, "-public-host", f"127.0.0.1:{self.port}", "-backend", "memory", "-log-level", "error"]

    def create_bucket(self, name: str) -> None:
        status = self._request("POST", "/storage/v1/b?project=tidegate", json.dumps({"name": name}).encode())
        assert status in (200, 409), status

    def settings(self, bucket: str, prefix: str) -> dict[str, str]:
        """What `ArrowRemoteStorageManager` needs to use this server."""
        return {"uri": f"gs://{bucket}/{prefix}", "endpoint.url": self.endpoint_url, "anonymous": "true"}
