"""Ranged GETs by presigned URLs, which botocore signs once per object, and which `RangeReader` sends.

The signing client takes about a millisecond of CPU per request, and copies the bytes. The range is not part of the
signature, so a presigned URL serves all ranges of its object until it expires. Any answer that is not the range is
asked for again by the signing client, which knows the errors of S3, and signs with the newest credentials. So is a
store behind an HTTP proxy.

A GET ends when no piece (`activity.PIECE_BYTES`) arrives in the time of its deadline, however long it takes.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError
from botocore.httpsession import ProxyConfiguration
from botocore.utils import get_environ_proxies
from cachetools import TTLCache

from tiers.errors import RemoteStorageError
from tiers.storage.activity import PIECE_BYTES, Activity, while_active
from tiers.storage.remote_storage_manager import Allocate
from tiers.storage.s3.errors import OVERLOAD_STATUS, error_of_answer, error_of_exception
from tiers.storage.s3.range_connection import ByteRange, LostConnectionError, OtherAnswerError
from tiers.storage.s3.range_reader import RangeReader, new_memory

_EXPIRES_S = 3600
_KEPT_S = _EXPIRES_S // 2
_KEPT_URLS = 10_000
_RANGE_NOT_SATISFIABLE = 416
_IN_TROUBLE = OVERLOAD_STATUS | {500, 502, 504}


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
        self._urls: TTLCache[str, str | None] = TTLCache(_KEPT_URLS, _KEPT_S)
        self._reader = RangeReader(max_connections, tls=tls)

    async def get(
        self, key: str, start: int = 0, end: int | None = None, allocate: Allocate = new_memory
    ) -> memoryview:
        """Returns the bytes `[start, end]`, by default the whole object; empty if `start` is at or beyond its end."""
        asked = ByteRange(start, end)
        try:
            async with while_active(self._timeout_s) as activity:  # it also covers the wait for a connection
                try:
                    url = await self._url(key)
                    if url is not None:
                        return await self._reader.get(url, asked, activity.moved, allocate)
                except OtherAnswerError as other:
                    self._urls.pop(key, None)  # the credentials that signed it may have expired meanwhile
                    if other.status in _IN_TROUBLE:  # more requests would not help
                        raise error_of_answer(self._bucket, key, other.status, "") from other
                return await self._get_by_client(key, asked, activity, allocate)
        except RemoteStorageError:
            raise
        except Exception as error:
            raise error_of_exception(self._bucket, key, error) from error

    async def close(self) -> None:
        await self._reader.close()

    async def _get_by_client(self, key: str, asked: ByteRange, activity: Activity, allocate: Allocate) -> memoryview:
        part = {} if asked.is_whole else {"Range": asked.value}
        try:
            answer = await self._client.get_object(Bucket=self._bucket, Key=key, **part)
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == _RANGE_NOT_SATISFIABLE:
                return memoryview(b"")
            raise
        async with answer["Body"] as body:
            room = asked.destination(answer.get("ContentLength"), answer.get("ContentRange", ""), allocate)
            filled = noted = 0
            async for piece in body.iter_chunks(PIECE_BYTES):
                room[filled : filled + len(piece)] = piece
                filled += len(piece)
                if filled - noted >= PIECE_BYTES:
                    noted = filled
                    activity.moved()
        if filled != len(room):
            raise LostConnectionError(f"the store closed the connection after {filled} of {len(room)} bytes")
        return room

    async def _url(self, key: str) -> str | None:
        """Returns the presigned URL; None if the environment names an HTTP proxy on the way to the store."""
        try:
            return self._urls[key]
        except KeyError:
            params = {"Bucket": self._bucket, "Key": key}
            url = str(await self._client.generate_presigned_url("get_object", Params=params, ExpiresIn=_EXPIRES_S))
            has_proxy = ProxyConfiguration(get_environ_proxies(url)).proxy_url_for(url)
            found = self._urls[key] = None if has_proxy else url
            return found
