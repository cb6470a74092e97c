"""A real S3 server for tests, benchmark and demo: versitygw over a folder of its own.

* It checks credentials (`--iam-dir`), and create-if-absent is atomic.
* The port stays the same over a restart; the objects are in the folder, so they survive a kill.
* Its access log tells which operations it was asked for: see `operations`.

The binary is `$TIDEGATE_VERSITYGW`, else `.cache/bin/versitygw`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from tests.servers.jars import CACHE, ServerUnavailable
from tests.servers.kafka import free_ports

VERSION = "v1.8.0"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
ACCESS_KEY_ID = "tidegate-root"
SECRET_ACCESS_KEY = "tidegate-secret"


def binary() -> Path:
    path = Path(os.environ.get("TIDEGATE_VERSITYGW") or CACHE / "bin" / "versitygw")
    if not os.access(path, os.X_OK):
        raise ServerUnavailable(
            f"{path} is missing: run GOBIN={path.parent} go install "
            f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
        )
    return path


class VersityGateway:
    """One server; `with` starts and stops it."""

    def __init__(self) -> None:
        self._binary = binary()
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-s3-"))
        for name in ("data", "iam"):
            (self.folder / name).mkdir()
        (self.port,) = free_ports(1)
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._buckets: set[str] = set()
        self._access_log = self.folder / "access.log"
        atexit.register(self.stop)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the server has answered a request."""
        command = [str(self._binary), "--port", f"127.0.0.1:{self.port}", "--keep-alive", "--quiet"]
        command += ["--access-log", str(self._access_log), "--iam-dir", str(self.folder / "iam")]
        command += ["posix", str(self.folder / "data")]
        environment = os.environ | {"ROOT_ACCESS_KEY": ACCESS_KEY_ID, "ROOT_SECRET_KEY": SECRET_ACCESS_KEY}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = (self.folder / "server.log").read_text(errors="replace").strip().splitlines()[-1:]
                self.kill()
                raise ServerUnavailable(f"versitygw did not start: {last[0] if last else 'no output'}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint_url, timeout=1).close()
        except urllib.error.HTTPError as refusal:
            refusal.close()  # without credentials: it is up
            return True
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Ends the process at once, as a crash would; `start` brings it back with its objects."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """The process stands still, its connections stay open; `resume` lets it go on."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Ends the process and removes its folder; safe to call twice."""
        if self._process is not None:
            self.resume()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def create_bucket(self, name: str) -> None:
        """Once per name: a bucket that was created before is left as it is."""
        if name not in self._buckets:
            async with self.client() as client:
                await client.create_bucket(Bucket=name)
            self._buckets.add(name)

    async def uploads(self, bucket: str) -> int:
        """How many multipart uploads are pending."""
        async with self.client() as client:
            return len((await client.list_multipart_uploads(Bucket=bucket)).get("Uploads", ()))

    def client(self) -> Any:
        """An aiobotocore client, to look at the server past what is tested."""
        return get_session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
            config=AioConfig(signature_version="s3v4", s3={"addressing_style": "path"}),
        )

    def operations(self, bucket: str) -> Counter[str]:
        """What the server was asked for in that bucket so far, such as `PutObject`."""
        lines = self._access_log.read_text().splitlines()
        fields = [line.split() for line in lines]
        return Counter(line[7].removeprefix("s3_") for line in fields if len(line) > 7 and line[1] == bucket)

    def settings(self, bucket: str) -> dict[str, str]:
        """What `S3RemoteStorageManager` needs to use this server."""
        return {
            "bucket": bucket,
            "endpoint.url": self.endpoint_url,
            "region": "us-east-1",
            "access.key.id": ACCESS_KEY_ID,
            "secret.access.key": SECRET_ACCESS_KEY,
            "path.style": "true",
        }
