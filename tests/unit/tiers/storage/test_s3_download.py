"""A download is signed once per object, and again when the signature is refused. A wrong range is no data."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.servers.stream_server import StreamServer
from tests.support.servers.versitygw import VersityGateway
from tiers.errors import (
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
    ThrottledError,
)
from tiers.storage.s3.download import S3Downloader

BUCKET = "s3-download"


class Signer:
    """Counts, and gives out whatever `spoil` makes of a right URL."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.signed = 0
        self.spoil = False

    async def generate_presigned_url(self, *args: Any, **kwargs: Any) -> str:
        self.signed += 1
        url: str = await self._client.generate_presigned_url(*args, **kwargs)
        return url[:-4] + "0000" if self.spoil else url


@pytest.fixture
async def signer(s3: VersityGateway) -> AsyncIterator[Signer]:
    await s3.create_bucket(BUCKET)
    async with s3.client() as client:
        yield Signer(client)


@pytest.fixture
async def downloader(signer: Signer) -> AsyncIterator[S3Downloader]:
    downloader = S3Downloader(signer, BUCKET, timeout_s=30, max_connections=4)
    yield downloader
    await downloader.close()


@pytest.fixture
async def key(s3: VersityGateway) -> str:
    key = f"object/{uuid.uuid4()} +ü"
    async with s3.client() as client:
        await client.put_object(Bucket=BUCKET, Key=key, Body=b"0123456789")
    return key


async def test_one_signature_serves_every_range(signer: Signer, downloader: S3Downloader, key: str) -> None:
    assert bytes(await downloader.get(key, 2, 4)) == b"234"
    assert bytes(await downloader.get(key, 5, 5)) == b"5"
    assert bytes(await downloader.get(key)) == b"0123456789"
    assert bytes(await downloader.get(key, 7)) == b"789"
    assert signer.signed == 1


async def test_a_kept_signature_that_is_refused_is_renewed_once(
    signer: Signer, downloader: S3Downloader, key: str
) -> None:
    signer.spoil = True
    with pytest.raises(RemoteStorageError, match="rejects the credentials"):
        await downloader.get(key)
    assert signer.signed == 1
    signer.spoil = False
    assert bytes(await downloader.get(key, 0, 0)) == b"0"
    assert signer.signed == 2


class FixedUrl:
    def __init__(self, url: str) -> None:
        self.url = url

    async def generate_presigned_url(self, *args: Any, **kwargs: Any) -> str:
        return self.url


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[S3Downloader]:
    """A server that knows one answer, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with StreamServer(serve) as server:
        url = f"http://127.0.0.1:{server.port}/b/k"
        downloader = S3Downloader(FixedUrl(url), "b", timeout_s=30, max_connections=1)
        try:
            yield downloader
        finally:
            await downloader.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 206 x\r\nContent-Length: 5\r\n\r\n23", RetriableRemoteStorageError),
        (b"HTTP/1.1 404 x\r\n\r\n<Code>NoSuchKey</Code>", RemoteResourceNotFoundError),
        (
            b"HTTP/1.1 503 x\r\nTransfer-Encoding: chunked\r\n\r\n15\r\n<Code>SlowDown</Code>\r\n0\r\n\r\n",
            ThrottledError,
        ),
        (b"HTTP/1.1 200 x\r\nContent-Length: 10\r\n\r\n0123456789", RemoteStorageError),
        (b"HTTP/1.1 302 x\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", RemoteStorageError),
        (b"nonsense\r\n\r\n", RetriableRemoteStorageError),
    ],
)
async def test_an_answer_that_is_not_the_range_is_an_error_of_the_store(
    answer: bytes, expected: type[RemoteStorageError]
) -> None:
    async with answering(answer) as downloader:
        with pytest.raises(RemoteStorageError) as raised:
            await downloader.get("k", 2, 6)
        assert type(raised.value) is expected


async def test_an_answer_that_trickles_occupies_no_place_for_ever() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 206 x\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.005)

    async with StreamServer(trickle) as server:
        downloader = S3Downloader(FixedUrl(f"http://127.0.0.1:{server.port}/b/k"), "b", 0.3, max_connections=1)
        try:
            with pytest.raises(RetriableRemoteStorageError, match="no answer in time"):
                await asyncio.wait_for(downloader.get("k", 0, 999_999), 30)
        finally:
            await downloader.close()
