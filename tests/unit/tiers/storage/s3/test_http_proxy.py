"""All requests to a store take the HTTP proxy of the environment, reads like writes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.fakes.copies import opened
from tests.support.servers.certificates import Authority
from tests.support.servers.stream_server import StreamServer
from tiers.errors import RetriableRemoteStorageError
from tiers.sockets import connected_socket
from tiers.storage.s3.http_proxy import HttpProxy, ProxyRefusedError, open_tunnel, proxy_of
from tiers.storage.s3.storage import S3RemoteStorageManager

STORE = "store.test"
"""A name that only the proxy can resolve."""
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


async def head_of(reader: asyncio.StreamReader) -> bytes:
    """Returns the head of the next request; b"" at the end."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, OSError):
        return b""


class Store:
    """Keeps one object of 5 bytes."""

    def __init__(self) -> None:
        self.targets: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await head_of(reader):
            method, target, *_ = head.split()
            self.targets.append(target)
            if method == b"PUT":
                await reader.readexactly(5)
                writer.write(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n')
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbytes")


class Proxy:
    """An HTTP proxy which leads every connection to one port. It answers CONNECT with `answer`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.heads: list[bytes] = []
        self.answer = b"HTTP/1.1 200 Connection established\r\n\r\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await head_of(reader)
        if not head:
            return
        self.heads.append(head)
        is_tunnel = head.startswith(b"CONNECT")
        if is_tunnel:
            writer.write(self.answer)
            if b" 200 " not in self.answer:
                writer.close()
                return
        opened, to_store = await asyncio.open_connection("127.0.0.1", self._port)
        if not is_tunnel:
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


def store_of(scheme: str) -> S3RemoteStorageManager:
    where = {"bucket": "b", "cluster.id": "c", "endpoint.url": f"{scheme}://{STORE}:8443", "region": "us-east-1"}
    keys = {"access.key.id": "key", "secret.access.key": "secret", "path.style": "true"}
    return S3RemoteStorageManager(where | keys)


@asynccontextmanager
async def behind_a_proxy(
    scheme: str, folder: Path, monkeypatch: pytest.MonkeyPatch, user: str = ""
) -> AsyncIterator[tuple[Store, Proxy, S3RemoteStorageManager]]:
    tls = None
    if scheme == "https":
        authority = Authority(folder)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(authority.identity("store", STORE))
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.ca))
    store = Store()
    async with StreamServer(store.serve, tls=tls) as server:
        proxy = Proxy(server.port)
        async with StreamServer(proxy.serve) as before:
            monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://{user}127.0.0.1:{before.port}")
            async with opened(store_of(scheme)) as manager:
                yield store, proxy, manager


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_reads_take_the_proxy_that_writes_take(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind_a_proxy(scheme, tmp_path, monkeypatch, "user:p%40ss@") as (store, proxy, manager):
        await manager.put_object("k", b"bytes")
        assert await manager.get_object("k") == b"bytes"
        assert await manager.get_object("k") == b"bytes"
    by_put, by_get = proxy.heads  # the second GET uses the connection of the first
    assert urlsplit(store.targets[0]).path == urlsplit(store.targets[-1]).path == b"/b/k"
    if scheme == "https":
        assert by_put.split()[:2] == by_get.split()[:2] == [b"CONNECT", b"store.test:8443"]
    else:
        assert by_get.startswith(b"GET http://store.test:8443/b/k?")
    assert b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in by_get
    assert b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in by_put


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 407 x\r\n\r\n", "with 407: put the user and the password into the address of the proxy"),
        (b"HTTP/1.1 503 x\r\n\r\n", "to store.test:8443 with 503"),
        (b"hello\r\n\r\n", "no answer of HTTP"),
        (b"HTTP/1.1 20", "closed the connection before it answered CONNECT"),
    ],
)
async def test_a_proxy_that_refuses_is_named_without_its_password(
    answer: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind_a_proxy("https", tmp_path, monkeypatch, "user:secret-word@") as (store, proxy, manager):
        proxy.answer = answer
        with pytest.raises(RetriableRemoteStorageError, match=said) as refused:
            await manager.get_object("k")
        assert "the HTTP proxy 127.0.0.1:" in str(refused.value)
        assert "secret-word" not in str(refused.value)
    assert not store.targets


@pytest.mark.parametrize(
    ("answer", "said"),
    [(b"x" * 40_000, "more than 16384 bytes"), (b"HTTP/1.1 200 x\r\n\r\nx", "sends bytes behind its answer")],
)
async def test_too_long_an_answer_to_connect_is_refused(answer: bytes, said: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()

    async with StreamServer(talk) as server:
        connection = await connected_socket("127.0.0.1", server.port)
        with closing(connection), pytest.raises(ProxyRefusedError, match=said):
            await open_tunnel(connection, HttpProxy("p", 1), STORE, 443)


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "https://s/k", None),
        ({"HTTPS_PROXY": "http://p:3128"}, "https://s/k", HttpProxy("p", 3128)),
        ({"HTTPS_PROXY": "p:3128"}, "https://s/k", HttpProxy("p", 3128)),
        ({"HTTPS_PROXY": "http://p"}, "https://s/k", HttpProxy("p", 80)),
        ({"HTTPS_PROXY": "http://p:3128"}, "http://s/k", None),
        ({"HTTPS_PROXY": "http://p:3128", "NO_PROXY": "example.org"}, "https://b.s3.example.org/k", None),
        ({"HTTPS_PROXY": "http://u@p:1"}, "https://s/k", HttpProxy("p", 1, "Basic dTo=")),
    ],
)
def test_the_environment_names_the_proxy(
    environment: dict[str, str], url: str, proxy: HttpProxy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


@pytest.mark.parametrize("address", ["https://p:3128", "socks5://p:1080"])
async def test_a_proxy_of_another_kind_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", address)
    with pytest.raises(ProxyRefusedError, match="must begin with `http://`"):
        proxy_of("https://s/k")
