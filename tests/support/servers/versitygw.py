"""A real S3 server for tests, benchmark and demo: versitygw over its own folder.

* It checks credentials (`--iam-dir`). Its create-if-absent is atomic.
* The port stays the same over a restart. The objects are in the folder, so they survive a kill.
* Its access log has the operations that clients requested: see `operations`.

The binary is `$TIDEGATE_VERSITYGW`, or `.cache/bin/versitygw` if that is not set.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from tests.support.servers.jars import CACHE
from tests.support.servers.own_server import OwnServer

VERSION = "v1.8.0"
ACCESS_KEY_ID = "tidegate-root"
SECRET_ACCESS_KEY = "tidegate-secret"


class VersityGateway(OwnServer):
    environment: ClassVar[Mapping[str, str]] = {"ROOT_ACCESS_KEY": ACCESS_KEY_ID, "ROOT_SECRET_KEY": SECRET_ACCESS_KEY}

    def __init__(self) -> None:
        super().__init__(
            Path(os.environ.get("TIDEGATE_VERSITYGW") or CACHE / "bin" / "versitygw"),
            f"GOBIN={CACHE / 'bin'} go install github.com/versity/versitygw/cmd/versitygw@{VERSION}",
        )
        for name in ("data", "iam"):
            (self.folder / name).mkdir()
        self._buckets: set[str] = set()
        self._access_log = self.folder / "access.log"

    def arguments(self) -> list[str]:
        options = ["--port", f"127.0.0.1:{self.port}", "--keep-alive", "--quiet"]
        options += ["--access-log", str(self._access_log), "--iam-dir", str(self.folder / "iam")]
        return [*options, "posix", str(self.folder / "data")]

    async def create_bucket(self, name: str) -> None:
        """Creates a bucket. Does nothing if the bucket exists."""
        if name not in self._buckets:
            async with self.client() as client:
                await client.create_bucket(Bucket=name)
            self._buckets.add(name)

    async def uploads(self, bucket: str) -> int:
        """Returns the number of pending multipart uploads."""
        async with self.client() as client:
            return len((await client.list_multipart_uploads(Bucket=bucket)).get("Uploads", ()))

    def client(self) -> Any:
        """Returns an aiobotocore client, to inspect the server without the code under test."""
        return get_session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
            config=AioConfig(signature_version="s3v4", s3={"addressing_style": "path"}),
        )

    def operations(self, bucket: str) -> Counter[str]:
        """Returns the number of requests of each operation, such as `PutObject`, in a bucket so far."""
        lines = self._access_log.read_text().splitlines()
        fields = [line.split() for line in lines]
        return Counter(line[7].removeprefix("s3_") for line in fields if len(line) > 7 and line[1] == bucket)

    def settings(self, bucket: str) -> dict[str, str]:
        """Returns the settings of `S3RemoteStorageManager` for this server."""
        return {
            "bucket": bucket,
            "endpoint.url": self.endpoint_url,
            "region": "us-east-1",
            "access.key.id": ACCESS_KEY_ID,
            "secret.access.key": SECRET_ACCESS_KEY,
            "path.style": "true",
        }
