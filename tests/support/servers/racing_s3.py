"""`RacingS3`: a server with the S3 protocol that honours a condition in sequence, and lets several racers win.

It checks a condition first, and writes later. versitygw does both in one step, so it cannot show this fault. The server
checks no signatures, and keeps its objects in memory.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import uuid
from collections.abc import Collection, Mapping
from types import MappingProxyType, TracebackType
from typing import Self

import google_crc32c
from aiohttp import web

CHECKSUM_IS_REQUIRED = (
    "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters"
)
"""What AWS says of a body without its checksum, if the bucket has object lock."""
_CHECKSUM = "x-amz-checksum-crc32c"
_PATIENCE_S = 0.5
"""How long a writer that passed the check waits for another one. Nobody comes if the requests are a sequence."""


class RacingS3:
    def __init__(
        self,
        races: Collection[str] = ("put", "complete"),
        refuses: Mapping[str, int] = MappingProxyType({}),
        *,
        is_locked: bool = False,
    ) -> None:
        """`races` are the creations that let several win: by PUT, or by multipart upload.

        `refuses` are the headers that the server does not know, with the status of its answer. `is_locked`: its bucket
        has object lock, so each body needs its checksum. Deletes leave a delete marker."""
        self._is_locked = is_locked
        self._races = races
        self._refuses = refuses
        self.objects: dict[str, bytes] = {}
        self.access_key_id = ""
        """The only one that the server accepts; empty: it accepts all."""
        self.writes_go_on = asyncio.Event()
        """While it is cleared, writes get no answer."""
        self.writes_go_on.set()
        self.hanging = 0
        self.expecting = 0
        """The number of requests that waited for `100 Continue`."""
        self.uploads: dict[str, dict[int, bytes]] = {}
        self._between: dict[str, int] = {}
        self._arrived = asyncio.Condition()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{bucket}/{key:.*}", self._serve)
        self._runner = web.AppRunner(app)
        self.url = ""

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def settings(self) -> dict[str, str]:
        return {
            "bucket": "bucket",
            "endpoint.url": self.url,
            "region": "us-east-1",
            "access.key.id": "any",
            "secret.access.key": "any",
            "path.style": "true",
        }

    async def _serve(self, request: web.Request) -> web.Response:
        key, query, body = request.match_info["key"], request.query, await request.read()
        self.expecting += "Expect" in request.headers
        if self.access_key_id not in request.headers.get("Authorization", "") + query.get("X-Amz-Credential", ""):
            return _error(403, "InvalidAccessKeyId")
        for header, status in self._refuses.items():
            if header in request.headers:
                return _error(status, "NotImplemented" if status == 501 else "InvalidArgument")
        if request.method in ("PUT", "POST"):
            self.hanging += 1
            await self.writes_go_on.wait()
            self.hanging -= 1
        if self._is_locked and request.method == "PUT" and _checksum(body) != request.headers.get(_CHECKSUM):
            return _error(400, "InvalidRequest", CHECKSUM_IS_REQUIRED)
        match request.method:
            case "POST" if "uploads" in query:
                upload = uuid.uuid4().hex
                self.uploads[upload] = {}
                return _xml(
                    f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                )
            case "PUT" if "uploadId" in query:
                self.uploads[query["uploadId"]][int(query["partNumber"])] = body
                return web.Response(headers={"ETag": _etag(body)})
            case "POST":
                answer = await self._write(request, key, self._whole(query["uploadId"]), "complete")
                if answer.status == 200:
                    del self.uploads[query["uploadId"]]
                return answer
            case "PUT":
                return await self._write(request, key, body, "put")
            case "DELETE":
                if "uploadId" not in query:
                    self.objects.pop(key, None)
                elif self.uploads.pop(query["uploadId"], None) is None:
                    return _error(404, "NoSuchUpload")
                return web.Response(status=204)
        if key not in self.objects:
            return _error(404, "NoSuchKey")
        return web.Response(body=self.objects[key], headers={"ETag": _etag(self.objects[key])})

    async def _write(self, request: web.Request, key: str, body: bytes, name: str) -> web.Response:
        if "If-None-Match" in request.headers and key in self.objects:
            return _error(412, "PreconditionFailed")
        if name in self._races and "If-None-Match" in request.headers:
            await self._meet_another(key)
        self.objects[key] = body
        if name == "complete":
            return _xml(f"<CompleteMultipartUploadResult><ETag>{_etag(body)}</ETag></CompleteMultipartUploadResult>")
        return web.Response(headers={"ETag": _etag(body)})

    def _whole(self, upload: str) -> bytes:
        return b"".join(body for _, body in sorted(self.uploads[upload].items()))

    async def _meet_another(self, key: str) -> None:
        """Waits until two writers of `key` have passed the check."""
        async with self._arrived:
            self._between[key] = self._between.get(key, 0) + 1
            self._arrived.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await self._arrived.wait_for(lambda: self._between[key] > 1)


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def _xml(text: str) -> web.Response:
    return web.Response(text=f'<?xml version="1.0"?>{text}', content_type="application/xml")


def _checksum(body: bytes) -> str:
    return base64.b64encode(google_crc32c.value(body).to_bytes(4, "big")).decode()


def _error(status: int, code: str, message: str = "") -> web.Response:
    return web.Response(
        status=status,
        text=f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>',
        content_type="application/xml",
    )
