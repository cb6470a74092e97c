"""Ranged GETs by presigned URLs, which botocore signs once per object, and which `RangeReader` sends.

The signing client takes about a millisecond of CPU per request. The range is not part of the signature, so a presigned
URL serves all ranges of its object until it expires. A GET ends when no piece (`activity.PIECE_BYTES`) arrives in the
time of its deadline, however long it takes as a whole.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

from cachetools import TTLCache

from tiers.errors import CredentialsRefusedError, RemoteStorageError
from tiers.storage.activity import Activity, while_active
from tiers.storage.remote_storage_manager import Allocate
from tiers.storage.s3.errors import UnsupportedRequestError, error_of_document, error_of_exception
from tiers.storage.s3.range_connection import ByteRange
from tiers.storage.s3.range_reader import RangeReader, new_memory

_EXPIRES_S = 3600
_KEPT_S = _EXPIRES_S // 2
_KEPT_URLS = 10_000
_RANGE_NOT_SATISFIABLE = 416


class S3Downloader:
    """Must be created on the event loop that uses it. `client` is aiobotocore's."""

    def __init__(
        self,
        client: Any,
        bucket: str,
        timeout_s: float,
        max_connections: int,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._client = client
        self._bucket = bucket
        self._timeout_s = timeout_s
        self._urls: TTLCache[str, str] = TTLCache(_KEPT_URLS, _KEPT_S)
        self._reader = RangeReader(max_connections, tls=tls)

    async def get(
        self, key: str, start: int = 0, end: int | None = None, allocate: Allocate = new_memory
    ) -> memoryview:
        """Returns the bytes `[start, end]`, by default the whole object; empty if `start` is at or beyond its end."""
        asked = ByteRange(start, end)
        try:
            async with while_active(self._timeout_s) as activity:  # it also covers the wait for a connection
                signed_before = key in self._urls
                try:
                    return await self._get(key, asked, activity, allocate)
                except (CredentialsRefusedError, UnsupportedRequestError):
                    # The credentials that signed the cached URL may have expired meanwhile.
                    self._urls.pop(key, None)
                    if not signed_before:
                        raise
                return await self._get(key, asked, activity, allocate)
        except RemoteStorageError:
            raise
        except Exception as error:
            raise error_of_exception(self._bucket, key, error) from error

    async def close(self) -> None:
        await self._reader.close()

    async def _get(self, key: str, asked: ByteRange, activity: Activity, allocate: Allocate) -> memoryview:
        answer = await self._reader.get(await self._url(key), asked, activity.moved, allocate)
        if answer.has_range:
            return answer.body
        if answer.status == _RANGE_NOT_SATISFIABLE:
            return memoryview(b"")
        raise error_of_document(self._bucket, key, answer.status, answer.body)

    async def _url(self, key: str) -> str:
        url = self._urls.get(key)
        if url is None:
            params = {"Bucket": self._bucket, "Key": key}
            signed = await self._client.generate_presigned_url("get_object", Params=params, ExpiresIn=_EXPIRES_S)
            url = self._urls[key] = str(signed)
        return url
