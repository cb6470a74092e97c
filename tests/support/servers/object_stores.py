"""Servers for `pyarrow.fs`: Azurite for Azure Blob Storage, fake-gcs-server for Google Cloud Storage.

Azurite checks credentials, fake-gcs-server does not. Each keeps its objects in its own folder. Ports stay the same over
a restart. Azurite is `$TIDEGATE_AZURITE`, or in `.cache/azurite` if that is not set. fake-gcs-server is
`$TIDEGATE_FAKE_GCS`, or `.cache/bin/fake-gcs-server` if that is not set.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.servers.jars import CACHE
from tests.support.servers.own_server import OwnServer

FAKE_GCS_VERSION = "v1.56.1"
ACCOUNT_NAME = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's public key, which every installation accepts."""


class Azurite(OwnServer):
    def __init__(self) -> None:
        installed = CACHE / "azurite" / "node_modules" / ".bin" / "azurite-blob"
        super().__init__(Path(os.environ.get("TIDEGATE_AZURITE") or installed), "make .cache/azurite/installed")
        self._containers: set[str] = set()

    def arguments(self) -> list[str]:
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self.folder / "data")]
        # pyarrow uses a newer version of Azure's interface than the newest version that Azurite lists.
        return [*place, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]

    def create_container(self, name: str) -> None:
        """Creates a container. Call it once per name."""
        if name in self._containers:
            return
        from pyarrow import fs  # the import takes half a second, and other tests need not wait for it

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
        """Returns the settings of `ArrowRemoteStorageManager` for this server."""
        return {
            "uri": f"az://{container}/{prefix}",
            "endpoint.url": self.endpoint_url,
            "account.name": ACCOUNT_NAME,
            "account.key": ACCOUNT_KEY,
        }


class FakeGcs(OwnServer):
    def __init__(self) -> None:
        super().__init__(
            Path(os.environ.get("TIDEGATE_FAKE_GCS") or CACHE / "bin" / "fake-gcs-server"),
            f"GOBIN={CACHE / 'bin'} go install github.com/fsouza/fake-gcs-server@{FAKE_GCS_VERSION}",
        )

    def arguments(self) -> list[str]:
        place = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        # The server puts this address into the URLs of uploads. It can only serve its own address as public host.
        return [*place, "-public-host", f"127.0.0.1:{self.port}", "-backend", "memory", "-log-level", "error"]

    def create_bucket(self, name: str) -> None:
        status = self.request("POST", "/storage/v1/b?project=tidegate", json.dumps({"name": name}).encode())
        assert status in (200, 409), status

    def settings(self, bucket: str, prefix: str) -> dict[str, str]:
        """Returns the settings of `ArrowRemoteStorageManager` for this server."""
        return {"uri": f"gs://{bucket}/{prefix}", "endpoint.url": self.endpoint_url, "anonymous": "true"}
