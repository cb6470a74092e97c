"""A range arrives by a presigned URL. All other answers, and stores behind an HTTP proxy, are the client library's."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from tests.support.fakes.copies import opened
from tests.support.servers.certificates import Authority
from tests.support.servers.stream_server import StreamServer
from tests.support.servers.versitygw import VersityGateway
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError, ThrottledError
from tiers.storage.s3.download import S3Downloader
from tiers.storage.s3.storage import S3RemoteStorageManager

BUCKET = "s3-download"
STORE = "store.test"
"""A name that only the proxy can resolve."""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


class Signer:
    """Counts the signatures, and the GETs of the client. While `spoils` is set, the signatures are wrong."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.signed = self.asked = 0
        self.spoils = False

    async def generate_presigned_url(self, *args: Any, **kwargs: Any) -> str:
        self.signed += 1
        url: str = await self._client.generate_presigned_url(*args, **kwargs)
        return url[:-4] + "0000" if self.spoils else url

    async def get_object(self, **kwargs: Any) -> Any:
        self.asked += 1
        return await self._client.get_object(**kwargs)


async def test_one_signature_serves_every_range_until_it_is_refused(s3: VersityGateway) -> None:
    await s3.create_bucket(BUCKET)
    key = f"object/{uuid.uuid4()} +ü"
    async with s3.client() as client:
        await client.put_object(Bucket=BUCKET, Key=key, Body=b"0123456789")
        signer = Signer(client)
        downloader = S3Downloader(signer, BUCKET, timeout_s=30, max_connections=4)
        assert bytes(await downloader.get(key, 2, 4)) == b"234"
        assert bytes(await downloader.get(key, 5, 5)) == b"5"
        assert bytes(await downloader.get(key)) == b"0123456789"
        assert bytes(await downloader.get(key, 7)) == b"789"
        assert (signer.signed, signer.asked) == (1, 0)
        assert bytes(await downloader.get(key, 10, 20)) == b""
        assert (signer.signed, signer.asked) == (1, 1)
        signer.spoils = True
        for _ in range(2):
            assert bytes(await downloader.get(key, 3, 4)) == b"34"
        assert (signer.signed, signer.asked) == (3, 3)
        signer.spoils = False
        for _ in range(2):
            assert bytes(await downloader.get(key, 3, 4)) == b"34"
        assert (signer.signed, signer.asked) == (4, 3)
        with pytest.raises(RemoteResourceNotFoundError, match="404 NoSuchKey"):
            await downloader.get("missing")
        await downloader.close()


class Body:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aenter__(self) -> Body:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def iter_chunks(self, size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), 2):
            yield self._data[start : start + 2]


class Client:
    """Answers each GET with `answer`, and signs the URL of a server that answers with `direct`."""

    def __init__(self, url: str, answer: dict[str, Any] | Exception) -> None:
        self._url = url
        self._answer = answer
        self.asked: list[str | None] = []

    async def generate_presigned_url(self, *args: Any, **kwargs: Any) -> str:
        return self._url

    async def get_object(self, **kwargs: Any) -> dict[str, Any]:
        self.asked.append(kwargs.get("Range"))
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def part(data: bytes, content_range: str, length: int | None = None) -> dict[str, Any]:
    return {"Body": Body(data), "ContentLength": length or len(data), "ContentRange": content_range}


RIGHT = part(b"23456", "bytes 2-6/10")
OTHER = b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"


def refused(status: int) -> ClientError:
    return ClientError({"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")


@asynccontextmanager
async def answering(direct: bytes, answer: dict[str, Any] | Exception) -> AsyncIterator[tuple[S3Downloader, Client]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(direct)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with StreamServer(serve) as server:
        client = Client(f"http://127.0.0.1:{server.port}/b/k", answer)
        downloader = S3Downloader(client, "b", timeout_s=30, max_connections=1)
        try:
            yield downloader, client
        finally:
            await downloader.close()


@pytest.mark.parametrize(
    ("direct", "answer", "expected"),
    [
        (b"HTTP/1.1 206 x\r\nContent-Length: 5\r\n\r\n23", RIGHT, RetriableRemoteStorageError),
        (b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n", RIGHT, ThrottledError),
        (b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n", RIGHT, RetriableRemoteStorageError),
        (b"HTTP/1.1 206 x\r\nContent-Length: 4\r\n\r\n2345", RIGHT, RetriableRemoteStorageError),
        (OTHER, part(b"2345", "bytes 2-5/10"), RetriableRemoteStorageError),
        (OTHER, part(b"2345", "bytes 2-6/10", 5), RetriableRemoteStorageError),
        (OTHER, {"Body": Body(b"23456")}, RetriableRemoteStorageError),
        (OTHER, refused(404), RemoteResourceNotFoundError),
        (OTHER, refused(410), RemoteStorageError),
        (OTHER, RIGHT, None),
        (b"HTTP/1.1 403 x\r\n\r\n<Code>ExpiredToken</Code>", RIGHT, None),
        (b"HTTP/1.1 206 x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n23456\r\n0\r\n\r\n", RIGHT, None),
        (b"nonsense\r\n\r\n", RIGHT, None),
    ],
)
async def test_the_client_is_asked_unless_the_answer_is_a_range_or_trouble(
    direct: bytes, answer: dict[str, Any] | Exception, expected: type[RemoteStorageError] | None
) -> None:
    """The error is of the class `expected`. None: the client's answer counts."""
    async with answering(direct, answer) as (downloader, client):
        with nullcontext() if expected is None else pytest.raises(expected) as raised:
            assert bytes(await downloader.get("k", 2, 6)) == b"23456"
        assert raised is None or type(raised.value) is expected
        assert client.asked == (["bytes=2-6"] if direct == OTHER or expected is None else [])


async def test_an_answer_that_trickles_occupies_no_place_for_ever() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 206 x\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.005)

    async with StreamServer(trickle) as server:
        client = Client(f"http://127.0.0.1:{server.port}/b/k", RIGHT)
        downloader = S3Downloader(client, "b", 0.3, max_connections=1)
        with pytest.raises(RetriableRemoteStorageError, match="no answer in time"):
            await asyncio.wait_for(downloader.get("k", 0, 999_999), 30)
        await downloader.close()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    """Returns the head of the next request; b"" at the end."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, OSError):
        return b""


async def serve_five_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await head_of(reader):
        if head.startswith(b"PUT"):
            await reader.readexactly(5)
            writer.write(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n')
        else:
            assert b"Cache-Control: no-cache\r\n" in head
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbytes")


class Proxy:
    """An HTTP proxy which leads every connection to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not (head := await head_of(reader)):
            return
        self.heads.append(head)
        opened, to_store = await asyncio.open_connection("127.0.0.1", self._port)
        if head.startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            to_store.write(head)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, to_store))
                both.create_task(_copy(opened, writer))
        finally:
            to_store.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
    except OSError:
        pass
    writer.close()


@asynccontextmanager
async def behind_a_proxy(
    scheme: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Proxy, S3RemoteStorageManager]]:
    tls = None
    if scheme == "https":
        authority = Authority(folder)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(authority.identity("store", STORE))
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.ca))
    where = {"bucket": "b", "cluster.id": "c", "endpoint.url": f"{scheme}://{STORE}:8443", "region": "us-east-1"}
    keys = {"access.key.id": "key", "secret.access.key": "secret", "path.style": "true"}
    async with StreamServer(serve_five_bytes, tls=tls) as server:
        proxy = Proxy(server.port)
        async with StreamServer(proxy.serve) as before:
            monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://user:p%40ss@127.0.0.1:{before.port}")
            async with opened(S3RemoteStorageManager(where | keys)) as manager:
                yield proxy, manager


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_reads_take_the_proxy_that_writes_take(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind_a_proxy(scheme, tmp_path, monkeypatch) as (proxy, manager):
        await manager.put_object("k", b"bytes")
        for _ in range(2):
            assert await manager.get_object("k") == b"bytes"
    assert proxy.heads
    for head in proxy.heads:
        target = head.split()[1].decode()
        assert target == f"{STORE}:8443" if scheme == "https" else urlsplit(target).hostname == STORE
        assert b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in head
