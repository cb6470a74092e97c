"""Ranged GETs by presigned URLs, which are signed once per object and read by a plain HTTP session.

The signing client takes about a millisecond of CPU per request. The range is not part of the signature, so a presigned
URL serves all ranges of its object until it expires. The body streams into a buffer of the announced length.
A GET ends when no piece (`activity.PIECE_BYTES`) arrives in the time of its deadline, however long it takes as a whole.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from cachetools import TTLCache
from yarl import URL

from tiers.errors import RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.activity import PIECE_BYTES, Activity, while_active
from tiers.storage.s3.errors import error_code_of, error_of_answer, error_of_exception

_EXPIRES_S = 3600
_KEPT_S = _EXPIRES_S // 2
_KEPT_URLS = 10_000
_ERROR_DOCUMENT_BYTES = 4096


class S3Downloader:
    """Owns an HTTP session, so it must be created on the event loop that uses it. `client` is aiobotocore's."""

    def __init__(self, client: Any, bucket: str, timeout_s: float, max_connections: int) -> None:
        self._client = client
        self._bucket = bucket
        self._timeout_s = timeout_s
        self._urls: TTLCache[str, URL] = TTLCache(_KEPT_URLS, _KEPT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections),
            timeout=aiohttp.ClientTimeout(),  # none here: the one in `get` also covers the wait for a connection
            auto_decompress=False,
            raise_for_status=False,
        )

    async def get(self, key: str, start: int = 0, end: int | None = None) -> memoryview:
        """Returns the bytes `[start, end]`, by default the whole object; empty if `start` is at or beyond its end."""
        try:
            async with while_active(self._timeout_s) as activity:
                signed_before = key in self._urls
                try:
                    return await self._get(key, start, end, activity)
                except _Refused as refused:
                    if not signed_before:
                        raise error_of_answer(self._bucket, key, refused.status, refused.code) from None
                    # The credentials that signed the cached URL may have expired meanwhile.
                    self._urls.pop(key, None)
                try:
                    return await self._get(key, start, end, activity)
                except _Refused as refused:
                    raise error_of_answer(self._bucket, key, refused.status, refused.code) from None
        except RemoteStorageError:
            raise
        except Exception as error:
            raise error_of_exception(self._bucket, key, error) from error

    async def close(self) -> None:
        await self._session.close()

    async def _get(self, key: str, start: int, end: int | None, activity: Activity) -> memoryview:
        whole = start == 0 and end is None
        headers = {} if whole else {"Range": f"bytes={start}-{'' if end is None else end}"}
        url = await self._url(key)
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            activity.moved()
            if response.status == 416:
                return memoryview(b"")
            if response.status != (200 if whole else 206):
                code = error_code_of(await response.content.read(_ERROR_DOCUMENT_BYTES))
                if response.status in (400, 403):
                    raise _Refused(response.status, code)
                raise error_of_answer(self._bucket, key, response.status, code)
            length = response.content_length
            if length is None or (end is not None and length > end + 1 - start):
                raise RetriableRemoteStorageError(
                    f"s3://{self._bucket}/{key}: the answer announces {length} bytes for {headers}"
                )
            buffer = bytearray(length)
            position = noted = 0
            async for piece in response.content.iter_any():
                buffer[position : position + len(piece)] = piece
                position += len(piece)
                if position - noted >= PIECE_BYTES:
                    noted = position
                    activity.moved()
            if position != length:
                raise RetriableRemoteStorageError(
                    f"s3://{self._bucket}/{key}: only {position} of {length} bytes arrived"
                )
            return memoryview(buffer)

    async def _url(self, key: str) -> URL:
        url = self._urls.get(key)
        if url is None:
            params = {"Bucket": self._bucket, "Key": key}
            signed = await self._client.generate_presigned_url("get_object", Params=params, ExpiresIn=_EXPIRES_S)
            url = self._urls[key] = URL(signed, encoded=True)
        return url


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status = status
        self.code = code
